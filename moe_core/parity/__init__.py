"""The parity tool: where do two engines differ first? Command: `moe-parity`. Library: `compare` and `assert_parity`."""

from moe_core.parity.compare import assert_parity as assert_parity
from moe_core.parity.compare import compare as compare
from moe_core.parity.report import Report as Report
from moe_core.parity.tolerance import Tolerance as Tolerance

"""Expert parallelism, planned: which experts lie on which rank, what travels between ranks, and what it costs.

Nothing here imports a framework or needs a device.
"""

from moe_core.parallel.placement import Move as Move
from moe_core.parallel.placement import Placement as Placement
from moe_core.parallel.placement import PlacementTables as PlacementTables
from moe_core.parallel.spec import ExchangeSpec as ExchangeSpec

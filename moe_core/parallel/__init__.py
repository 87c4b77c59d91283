"""Expert parallelism, planned without a framework or a device: experts of ranks, messages, and their cost."""

from moe_core.parallel.choices import choose_chunks as choose_chunks
from moe_core.parallel.choices import choose_ranks as choose_ranks
from moe_core.parallel.cost import Prediction as Prediction
from moe_core.parallel.cost import predict as predict
from moe_core.parallel.cost import simulate as simulate
from moe_core.parallel.header import PeerFailed as PeerFailed
from moe_core.parallel.header import compare_headers as compare_headers
from moe_core.parallel.machine import Link as Link
from moe_core.parallel.machine import LinkTiming as LinkTiming
from moe_core.parallel.machine import Machine as Machine
from moe_core.parallel.machine import MachineRecord as MachineRecord
from moe_core.parallel.machine import choose_mode as choose_mode
from moe_core.parallel.machine import fit_link as fit_link
from moe_core.parallel.machine import machine_of as machine_of
from moe_core.parallel.placement import Move as Move
from moe_core.parallel.placement import Placement as Placement
from moe_core.parallel.placement import PlacementTables as PlacementTables
from moe_core.parallel.plan import ExchangePlan as ExchangePlan
from moe_core.parallel.plan import plan_exchange as plan_exchange
from moe_core.parallel.result import ParallelOutput as ParallelOutput
from moe_core.parallel.spec import ExchangeSpec as ExchangeSpec
from moe_core.parallel.tensor import TensorSplit as TensorSplit
from moe_core.parallel.traffic import Zipf as Zipf

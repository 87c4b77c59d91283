"""LoRA adapters of experts: every library's packing read, written and merged by name."""

from moe_core.checkpoint.adapters.files import read_adapter as read_adapter
from moe_core.checkpoint.adapters.files import write_adapter as write_adapter
from moe_core.checkpoint.adapters.form import Adapter as Adapter
from moe_core.checkpoint.adapters.form import ExpertAdapter as ExpertAdapter
from moe_core.checkpoint.adapters.form import LoRAPair as LoRAPair
from moe_core.checkpoint.adapters.merge import Merged as Merged
from moe_core.checkpoint.adapters.merge import merge_adapter as merge_adapter
from moe_core.checkpoint.adapters.merge import verify_adapter as verify_adapter
from moe_core.checkpoint.adapters.packings import PACKINGS as PACKINGS

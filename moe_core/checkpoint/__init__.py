"""Checkpoints: read and write Hugging Face files and LoRA adapters, convert MaxText parameter trees.

Reading gives one MoE layer at a time, as NumPy arrays and the spec that computes with them. Nothing here needs torch
or jax. Hugging Face files need the package safetensors (`pip install 'moebius[checkpoint]'`).
"""

from moe_core.checkpoint.adapters import Adapter as Adapter
from moe_core.checkpoint.adapters import ExpertAdapter as ExpertAdapter
from moe_core.checkpoint.adapters import LoRAPair as LoRAPair
from moe_core.checkpoint.adapters import Merged as Merged
from moe_core.checkpoint.adapters import merge_adapter as merge_adapter
from moe_core.checkpoint.adapters import read_adapter as read_adapter
from moe_core.checkpoint.adapters import verify_adapter as verify_adapter
from moe_core.checkpoint.adapters import write_adapter as write_adapter
from moe_core.checkpoint.convert import ConversionProgress as ConversionProgress
from moe_core.checkpoint.convert import ConversionReport as ConversionReport
from moe_core.checkpoint.convert import LayerError as LayerError
from moe_core.checkpoint.convert import convert_checkpoint as convert_checkpoint
from moe_core.checkpoint.hidden_states import load_hidden_states as load_hidden_states
from moe_core.checkpoint.layer import Checkpoint as Checkpoint
from moe_core.checkpoint.layer import MoELayer as MoELayer
from moe_core.checkpoint.layer import open_checkpoint as open_checkpoint
from moe_core.checkpoint.maxtext import from_maxtext as from_maxtext
from moe_core.checkpoint.maxtext import to_maxtext as to_maxtext
from moe_core.checkpoint.storage import ReadProgress as ReadProgress
from moe_core.checkpoint.write import WriteProgress as WriteProgress
from moe_core.checkpoint.write import layer_tensors as layer_tensors
from moe_core.checkpoint.write import other_tensors as other_tensors
from moe_core.checkpoint.write import save_checkpoint as save_checkpoint

"""Interfaces of other libraries on our ops."""

from moe_torch.compat.hub import Served, serve_transformers
from moe_torch.compat.installed import Installed, install, uninstall

__all__ = ["Installed", "Served", "install", "serve_transformers", "uninstall"]

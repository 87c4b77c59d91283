"""Interfaces of other libraries on our ops."""

from moe_torch.compat.installed import Installed, install, uninstall

__all__ = ["Installed", "install", "uninstall"]

"""The compile gate and its plans."""

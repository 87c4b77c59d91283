"""Random cases of every op and layer, on every engine, against an oracle of their own in float64."""

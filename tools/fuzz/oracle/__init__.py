"""The oracle: docs/user and the contract of numerics computed anew in float64. It imports torch and nothing of ours."""

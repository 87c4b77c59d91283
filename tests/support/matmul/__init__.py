"""What tests of grouped products share."""

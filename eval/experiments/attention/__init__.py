"""The attention kernel against SDPA and FlexAttention: suites attention-kernel and attention-check."""

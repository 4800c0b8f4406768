"""The attention kernels against SDPA and FlexAttention: suites attention-kernel, -sparse and -check."""

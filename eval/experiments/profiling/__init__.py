"""Prefill times of an engine, T(cached, new): suite prefill-profile, and the measurement of `ragorder profile`."""

"""Prefill times T(cached, new): suite prefill-profile and `ragorder profile`."""

"""Many replicas of an engine behind a router: suites replicas and replicas-changed."""

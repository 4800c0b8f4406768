"""Measurements that reproduce a paper or test this project: in the repository, not in the wheel."""

"""The command line `ragorder`: order, bench, eval, replay, serve, stats, tiers, profile, demo and doctor."""

from __future__ import annotations

import sys

try:
    import click

    from ragorder.cli.bench import bench
    from ragorder.cli.demo import demo
    from ragorder.cli.doctor import doctor
    from ragorder.cli.eval import eval as evaluation
    from ragorder.cli.group import MainGroup
    from ragorder.cli.order import order
    from ragorder.cli.profile import profile
    from ragorder.cli.replay import replay
    from ragorder.cli.serve import serve
    from ragorder.cli.stats import stats
    from ragorder.cli.tiers import tiers
except KeyboardInterrupt:
    # click, which says so otherwise, is not there yet.
    sys.exit("Aborted!")

__all__ = ["main"]


@click.group(cls=MainGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(package_name="ragorder", prog_name="ragorder")
def main() -> None:
    """Orders retrieved documents so that a serving engine reuses more of its prefix cache."""
    from ragorder._signals import end_on_sigterm

    end_on_sigterm()


main.add_command(order)
main.add_command(bench)
main.add_command(evaluation)
main.add_command(replay)
main.add_command(serve)
main.add_command(stats)
main.add_command(tiers)
main.add_command(profile)
main.add_command(demo)
main.add_command(doctor)

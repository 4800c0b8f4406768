"""Former command of the suite reordering."""

from ragorder.eval._aliases.command import run_suite

if __name__ == "__main__":
    run_suite(
        "reordering",
        former={
            "--own-server": lambda _: ["--engine", "openai"],
            "--base-url": lambda url: ["--engine", "openai", "--base-url", url, "--set", "capacity_tokens=unlimited"],
            "--seeds": lambda count: ["--seeds", ",".join(map(str, range(int(count))))],
        },
    )

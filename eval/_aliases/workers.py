"""Former command of the suite workers."""

from ragorder.eval._aliases.command import run_suite

if __name__ == "__main__":
    seeds: list[str] = []

    def collect(seed: str) -> list[str]:
        seeds.append(seed)
        return ["--seeds", ",".join(seeds)]

    run_suite("workers", former={"--seed": collect}, defaults=["--engine", "openai"])

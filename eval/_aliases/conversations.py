"""Former command of the suite conversations."""

from ragorder.eval._aliases.command import run_suite

if __name__ == "__main__":
    engines = {"simulated": "sim", "vllm": "openai"}
    run_suite(
        "conversations",
        former={
            "--engine": lambda name: ["--engine", engines.get(name, name)],
            "--seed": lambda seed: ["--seeds", seed],
            "--layout": lambda name: ["--set", f"layout={name.replace(',', '')}"],
        },
        defaults=["--seeds", "0"],
    )

"""The command `python -m ragorder.kernels.random_model FOLDER`."""

from __future__ import annotations

from pathlib import Path

import click

from ragorder.kernels.random_model import make_model, standard_texts


@click.command(context_settings={"help_option_names": ["-h", "--help"]})
@click.argument("folder", type=click.Path(file_okay=False, path_type=Path))
@click.option("--layers", type=click.IntRange(1), default=2, show_default=True, help="Number of layers.")
@click.option(
    "--hidden-size",
    type=click.IntRange(64),
    default=256,
    show_default=True,
    help="Width of the layers, a multiple of 64.",
)
def main(folder: Path, layers: int, hidden_size: int) -> None:
    """Make a language model with random weights, to try an engine without a download.

    FOLDER gets a Qwen2 model and its tokenizer, in the format of transformers and vLLM. Its answers are meaningless;
    times and cached tokens are those of a model of that size. Needs the extra torch.
    """
    try:
        made = make_model(folder, texts=standard_texts(), layers=layers, hidden_size=hidden_size)
    except (ValueError, OSError, ImportError) as error:
        raise click.ClickException(str(error)) from None
    click.echo(made)


if __name__ == "__main__":
    main(prog_name="python -m ragorder.kernels.random_model")

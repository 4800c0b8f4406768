"""The documentation site: `make docs`."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest

import ragorder
from ragorder.cli import main

ROOT = Path(__file__).resolve().parents[2]
CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    sphinx = [sys.executable, "-m", "sphinx", "-W", "-q", "-b", "html", "-d", f"{folder}/trees", "docs"]
    done = subprocess.run([*sphinx, f"{folder}/html"], cwd=ROOT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "html"


@pytest.mark.slow
class TestTheSite:
    def test_the_reference_has_all_that_the_package_exports(self, site: Path) -> None:
        page = (site / "reference" / "api.html").read_text("utf-8")
        assert [name for name in ragorder.__all__ if f'id="ragorder.{name}"' not in page] == []

    def test_the_reference_has_each_command_with_its_options(self, site: Path) -> None:
        page = (site / "reference" / "cli.html").read_text("utf-8")
        shown = set(re.findall(r'id="cmdoption-ragorder-([\w-]+)"', page))
        for name in main.list_commands(click.Context(main)):
            command = main.get_command(click.Context(main), name)
            assert command is not None
            assert f'id="ragorder-{name}"' in page
            if not isinstance(command, click.Group):
                options = [each for each in command.params if isinstance(each, click.Option) and not each.hidden]
                assert options == [] or any(option.startswith(name) for option in shown), name

    @pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine: install the package chromium")
    @pytest.mark.parametrize("width", [390, 1280])
    def test_no_line_of_code_is_cut_off(self, site: Path, width: int) -> None:
        playwright = pytest.importorskip("playwright.sync_api")
        with playwright.sync_playwright() as driver:
            browser = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
            tab = browser.new_page(viewport={"width": width, "height": 800})
            for name in ("index", "proxy", "batches"):
                tab.goto((site / f"{name}.html").as_uri())
                wide = "[...document.querySelectorAll('pre')].filter(e => e.scrollWidth > e.clientWidth).length"
                assert (tab.locator("pre").count() > 0, tab.evaluate(wide)) == (True, 0), name
            browser.close()

    def test_no_docstring_shows_its_markup(self, site: Path) -> None:
        page = (site / "reference" / "api.html").read_text("utf-8")
        text = re.sub(r"<[^>]*>", "", re.sub(r"<pre>.*?</pre>", "", page, flags=re.DOTALL))
        assert re.findall(r".{20}`.{20}", text) == []

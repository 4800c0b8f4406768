"""The pictures of the proxy's page and of a report, taken by Chromium.

    PYTHONPATH=.:tests python docs/screenshots/take.py [proxy] [report]

The page is of a real `ragorder serve` before a server without a model, which simulates vLLM's prefix cache.
"""

from __future__ import annotations

import json
import shutil
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import Any

from playwright.sync_api import sync_playwright
from support.chat_server import ChatServer
from support.results import RESULTS, titles
from support.serve_process import ServeProcess, launching
from support.serving_app import serving

from ragorder.eval.data.workloads import make_workload

FOLDER = Path(__file__).resolve().parent
COMMAND = (sys.executable, "-m", "ragorder")
SIZE = {"width": 1280, "height": 800}
SHOWN = "served"
REQUESTS = 240


def ask(url: str, documents: list[dict[str, str]], question: str) -> None:
    body = {"model": "served", "messages": [], "ragorder": {"documents": documents, "query": question}}
    headers = {"Content-Type": "application/json"}
    request = urllib.request.Request(f"{url}/v1/chat/completions", json.dumps(body).encode(), headers)  # noqa: S310
    with urllib.request.urlopen(request, timeout=60) as response:  # noqa: S310
        response.read()


def proxy_page(browser: Any) -> None:
    server = ChatServer(capacity_tokens=50_000)
    workload = make_workload("mix8", 0)
    with serving() as serve, launching(ServeProcess, *COMMAND, "serve", "--port", "0") as launch:
        proxy = launch("--upstream", serve(server.app()))
        tab = browser.new_page(viewport=SIZE)
        tab.goto(f"{proxy.url}/ragorder")
        for number, ranking in enumerate(workload.rankings[:REQUESTS]):
            documents = [{"id": f"kb-{each}", "text": f"Text of document {each}. " * 30} for each in ranking]
            ask(proxy.url, documents, f"Question {number}?")
            # The graph has a point every two seconds.
            time.sleep(0.1)
        tab.wait_for_timeout(4_000)
        tab.screenshot(path=FOLDER / "proxy.png")
        tab.close()


def report_page(browser: Any) -> None:
    from ragorder.eval.report import make_report, read_results, render_html
    from ragorder.eval.running.suite import load_suites

    with tempfile.TemporaryDirectory() as folder:
        page = Path(folder) / "report.html"
        made = make_report(read_results(RESULTS / SHOWN), load_suites(), title=titles()[SHOWN])
        page.write_text(render_html(made), "utf-8")
        tab = browser.new_page(viewport=SIZE)
        tab.goto(page.as_uri())
        tab.screenshot(path=FOLDER / "report.png")


def main(names: list[str]) -> None:
    takers = {"proxy": proxy_page, "report": report_page}
    with sync_playwright() as driver:
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        browser = driver.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        for name in names or takers:
            takers[name](browser)
        browser.close()


if __name__ == "__main__":
    main(sys.argv[1:])

"""The live page in a real browser: a kill and a join appear without a reload; texts stay texts; it fits a phone."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from cluster import Cluster
from tools.browser import HOW, Browser, find_chromium
from watching import EVIL, SECRET, Served, story, told

from phalanx.watch._access import PageAccess, token_of
from phalanx.watch._page_file import page_html
from phalanx.watch._report import with_details

pytestmark = [pytest.mark.skipif(not find_chromium(), reason=HOW), pytest.mark.timeout(280)]


STRANGER = """(() => {
    window.ran = 0;
    const script = document.createElement("script"), image = document.createElement("img");
    script.textContent = "window.ran = 1";
    image.src = "http://127.0.0.1:9/x.png";
    document.body.append(script, image);
    return fetch("http://127.0.0.1:9/").catch(() => 0);
})()"""
"""What somebody's text would do, had it become a tag."""


ASKED = (("scale", "3"), ("drain", "n.b"), ("save", ""), ("stop", ""))
"""What the page can ask of a job, and the value that goes with it."""


def wait_for_text(browser: Browser, element: str, text: str) -> None:
    browser.wait_for(f"document.getElementById('{element}').textContent.includes({text!r})")


def test_a_kill_and_a_join_are_shown_without_a_reload(tmp_path: Path) -> None:
    cluster = Cluster(tmp_path / "job", 2, 24, hold=8, dashboard="0", script_flag="--save=4")
    try:
        cluster.wait_workers(2)
        cluster.wait_step(8)
        [address] = re.findall(r"the job is shown at (http://\S+)", cluster.text())
        with Browser(tmp_path / "profile") as browser:
            browser.open(address)
            browser.wait_for("document.querySelectorAll('[data-worker]').length === 2")
            browser.ask("window.isTheSamePage = true")
            victim = cluster.newest_round()[1]
            cluster.signal(victim)
            browser.wait_for("document.querySelectorAll('[data-mark=death]').length === 1")
            wait_for_text(browser, "incidents", "SIGKILL")
            browser.click(f"[data-worker='{victim}']")
            browser.wait_for("document.getElementById('detail').open")
            assert "SIGKILL" in browser.ask("document.getElementById('detail').textContent")
            assert browser.ask("!!document.getElementById('stderr')")
            browser.click("#detail button")
            browser.wait_for("!document.getElementById('detail').open")
            cluster.resize(3)
            cluster.wait_workers(3)
            browser.wait_for("document.querySelectorAll('[data-end=running]').length === 3")
            wait_for_text(browser, "tiles", "3 / 3")
            wait_for_text(browser, "saves", "last savestep ")
            wait_for_text(browser, "nodes", "works")
            assert browser.ask("document.querySelectorAll('#s-series polyline').length") == 2
            assert browser.ask("document.querySelector('#heat canvas').height") >= 2, "a row for each worker"
            cluster.release()
            wait_for_text(browser, "tiles", "24 / 24")
            assert browser.ask("window.isTheSamePage") is True
            heard = browser.problems
        cluster.finish()
    finally:
        cluster.close()
    assert [one for one in heard if "ERR_CONNECTION_REFUSED" not in one] == []  # after its end nobody answers


def test_texts_stay_texts_and_the_page_fits_a_phone(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(page_html({**told(story(EVIL)).read(with_details), "live": False, "facts": []}))
    backgrounds = set()
    with Browser(tmp_path / "profile") as browser:
        for width, dark in ((1200, False), (390, True)):
            browser.resize(width, 900)
            browser.prefer(dark=dark)
            browser.open(f"file://{page}")
            browser.wait_for("document.body && document.body.dataset.shown === '1'")
            assert browser.ask("document.querySelectorAll('img').length") == 0
            assert browser.ask("document.querySelectorAll('script').length") == 2
            assert browser.ask("document.getElementById('last-failure').textContent.includes('onerror=alert(2)')")
            assert browser.ask("document.documentElement.scrollWidth") <= width
            browser.click('[data-worker="n.b"]')
            browser.wait_for("document.getElementById('detail').open")
            assert browser.ask("document.getElementById('stderr').textContent").startswith("</script>")
            assert browser.ask("document.documentElement.scrollWidth") <= width
            browser.click("#detail button")
            browser.wait_for("!document.getElementById('detail').open")
            for mark in ("hang", "leave"):
                assert browser.ask(f"document.querySelectorAll('[data-worker=\"n.c\"] [data-mark={mark}]').length") == 1
            browser.click('[data-worker="n.c"]')
            browser.wait_for("document.getElementById('detail').open")
            assert browser.ask("document.getElementById('stacks').textContent") == f"in all_reduce: {EVIL}"
            assert browser.ask("document.documentElement.scrollWidth") <= width
            bands = browser.ask("document.querySelectorAll('#s-series .band').length")
            assert bands == 1, "every other generation: of two, the first"
            backgrounds.add(browser.ask("getComputedStyle(document.body).backgroundColor"))
            assert browser.problems == []
    assert len(backgrounds) == 2, "light, and dark"


def test_the_token_lets_in_the_policy_holds_and_the_secret_signs_in_the_browser(tmp_path: Path) -> None:
    served = Served(PageAccess(host="0.0.0.0", secret=SECRET), text=EVIL)
    served.hub.view.state = "running"  # of a job that has ended nothing can be changed
    try:
        with Browser(tmp_path / "profile") as browser:
            browser.open(served.client.url)
            browser.wait_for("document.body && document.body.textContent.includes('a token is needed')")
            assert [one for one in browser.problems if "401" not in one] == []
            browser.open(f"{served.client.url}?token={token_of(SECRET)}")
            browser.wait_for("document.body && document.body.dataset.shown >= 1")
            assert browser.ask("location.search") == "", "the token is out of sight"
            assert token_of(SECRET) not in browser.ask("document.cookie")
            browser.problems.clear()

            for number, (action, value) in enumerate(ASKED):
                browser.click(f"[data-act={action}]")
                if value:
                    browser.type("#act-value", value)
                browser.type("#act-secret", SECRET.decode())
                browser.click("#act-go")
                assert len(served.host.done) == number, "not without a confirmation"
                browser.click("#act-sure")
                browser.click("#act-go")
                browser.wait_for(f"document.getElementById('act-told').textContent === '{action} is done'")
                browser.ask("document.getElementById('detail').close()")
            asked = [(action, wish.get("nproc") or wish.get("node")) for action, wish in served.host.done]
            assert asked == [("scale", 3), ("drain", "n.b"), ("save", None), ("stop", None)]
            assert browser.problems == []

            browser.ask(STRANGER)
            browser.wait_for("document.body.lastChild.tagName === 'IMG'")
            assert browser.ask("window.ran") == 0
            kept_out = [one for one in browser.problems if "Content Security Policy" in one]
            assert len(kept_out) >= 3, browser.problems
    finally:
        served.close()

"""Reports in a headless Chromium: what a reader clicks, points at, types and saves, without any network."""

import csv
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree

import pytest

from fed.clients.data.describe import partition_of
from fed.reports.html import comparison_report
from tests.fed.reports.browser import CHROMIUM, Browser
from tests.fed.reports.test_html import HOSTILE, data_of, record, result_of

pytestmark = [pytest.mark.long, pytest.mark.browser]

ROWS = "[...document.querySelector('table.rows').tBodies[0].rows].filter(row => !row.hidden)"
NAMES = f"{ROWS}.map(row => row.cells[0].textContent.trim())"
SORT_BY_ACCURACY = "document.querySelector('table.rows').tHead.rows[0].cells[1].firstChild"
PICTURE = "[...document.querySelectorAll('.picture')].find(picture => picture.offsetParent)"
TIP = f"{PICTURE}.querySelector('.tip')"


@pytest.fixture(scope="module")
def page(tmp_path_factory: pytest.TempPathFactory) -> Path:
    runs = {
        "FedAvg": [record(0.5, 0.7, 0.8), record(0.6, 0.7, 0.9)],
        HOSTILE: [record(0.5, 0.7, 0.95), record(0.6, 0.7, 0.93)],
        "failed": [record(0.3, None, None), record(0.2, None, None)],
        "local": [record(0.2, 0.3, 0.4, sends=False), record(0.2, 0.3, 0.5, sends=False)],
    }
    result = result_of(runs, {"local": "local"}, name=HOSTILE, target=0.8)
    path = tmp_path_factory.mktemp("page") / "report.html"
    path.write_text(comparison_report(result, {"Who holds what": partition_of(data_of(40, 10))}), encoding="utf-8")
    return path


@pytest.fixture
def browser(tmp_path: Path, page: Path) -> Iterator[Browser]:
    """The page at a width of 1,000 pixels; whatever a test does, it asked for nothing and no script failed."""
    assert CHROMIUM is not None, "reports are tried in Chromium: sudo apt install chromium"
    with Browser(tmp_path) as opened:
        opened.open(page, 1000)
        yield opened
        told = [event["method"] for event in opened.events]
        asked = [
            event["params"]["request"]["url"]
            for event in opened.events
            if event["method"] == "Network.requestWillBeSent"
        ]
        assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
        assert not {"Log.entryAdded", "Runtime.exceptionThrown"} & {*told}


def test_a_click_on_a_heading_sorts_by_value(browser: Browser) -> None:
    browser.click(SORT_BY_ACCURACY)
    assert browser.value_of(NAMES) == ["local", "FedAvg", HOSTILE, "failed"], "what has no value is last"
    browser.click(SORT_BY_ACCURACY)
    assert browser.value_of(NAMES) == [HOSTILE, "FedAvg", "local", "failed"]
    assert browser.value_of(f"{SORT_BY_ACCURACY}.parentNode.getAttribute('aria-sort')") == "descending"


def test_keys_sort_as_clicks_do(browser: Browser) -> None:
    browser.value_of(f"{SORT_BY_ACCURACY}.focus()")
    browser.press("Enter", "\r")
    assert browser.value_of(NAMES) == ["local", "FedAvg", HOSTILE, "failed"]


def test_filter_leaves_rows_that_hold_all_words(browser: Browser) -> None:
    browser.click("document.querySelector('input[type=search]')")
    browser.write("fed")
    assert browser.value_of(NAMES) == ["FedAvg"]
    assert browser.value_of("document.querySelector('.tools [role=status]').textContent") == "1 of 4 rows"
    browser.write("<script>")
    assert browser.value_of(NAMES) == []


def test_values_stand_beside_the_pointer(browser: Browser) -> None:
    browser.move(*browser.point_of(f"{PICTURE}.querySelector('svg')"))
    left, top = browser.value_of(
        f"(() => {{ const svg = {PICTURE}.querySelector('svg'), seen = svg.getBoundingClientRect();"
        "const {box} = JSON.parse(svg.querySelector('metadata').textContent)[0];"
        "const scale = seen.width / svg.viewBox.baseVal.width;"
        "return [seen.x + (box[0] + box[2]) / 2 * scale, seen.y + (box[1] + box[3]) / 2 * scale]; })()"
    )
    browser.move(left, top)
    lines = browser.value_of(f"[...{TIP}.children].map(line => line.textContent)")
    assert lines == ["round: 2", "FedAvg: 0.7", f"{HOSTILE}: 0.7", "local: 0.3"]
    browser.move(1, 1)
    assert browser.value_of(f"{TIP}.hidden")


def test_arrow_keys_go_from_value_to_value(browser: Browser) -> None:
    browser.value_of(f"{PICTURE}.focus()")
    said = []
    for key in ("ArrowRight", "ArrowRight", "ArrowLeft", "Escape"):
        browser.press(key)
        said.append(browser.value_of(f"{TIP}.hidden ? '' : {TIP}.firstChild.textContent"))
    assert said == ["round: 1", "round: 2", "round: 1", ""]


def test_tables_and_curves_are_saved_as_csv(browser: Browser) -> None:
    browser.click("document.querySelector('section .tools button')")
    rows = [*csv.reader(browser.downloaded("Results.csv").read_text(encoding="utf-8").splitlines())]
    assert rows[0][:2] == ["variant", "final accuracy"]
    assert [row[0] for row in rows[1:]] == ["FedAvg", HOSTILE, "failed", "local"]
    browser.click("[...document.querySelectorAll('figure .tools button')].find(one => one.textContent === 'save CSV')")
    saved = browser.downloaded("bytes.csv").read_text(encoding="utf-8")
    curves = [*csv.reader(saved.splitlines())]
    assert [HOSTILE, "round", "3", "test accuracy", "0.94"] in curves
    assert ["local", "bytes sent and received by all", "", "test accuracy", "0.45"] in curves


def test_cells_of_a_heat_map_have_values(browser: Browser) -> None:
    maps = (
        "[...document.querySelectorAll('.picture')].filter(one => one.innerHTML.includes('cells') && one.offsetParent)"
    )
    held = data_of(40, 10)
    counts = partition_of(held)
    assert counts is not None
    browser.value_of(f"{maps}[0].scrollIntoView()")
    row, column = 3, 7
    left, top = browser.value_of(
        f"(() => {{ const svg = {maps}[0].querySelector('svg'), seen = svg.getBoundingClientRect();"
        "const {box, rows, columns} = JSON.parse(svg.querySelector('metadata').textContent).at(-1);"
        "const scale = seen.width / svg.viewBox.baseVal.width;"
        f"const x = box[0] + ({column} + 0.5) / columns.length * (box[2] - box[0]);"
        f"const y = box[3] - ({row} + 0.5) / rows.length * (box[3] - box[1]);"
        "return [seen.x + x * scale, seen.y + y * scale]; })()"
    )
    browser.move(left, top)
    lines = browser.value_of(f"[...{maps}[0].querySelector('.tip').children].map(line => line.textContent)")
    assert lines == [f"client: {column}, class: {row}", f"samples: {counts.counts_KC[column, row]}"]
    browser.value_of(f"[...{maps}[0].closest('figure').querySelectorAll('.tools button')].at(-1).click()")
    saved = [*csv.reader(browser.downloaded("what.csv").read_text(encoding="utf-8").splitlines())]
    assert saved[0] == ["client", "class", "samples"]
    assert len(saved) == 1 + counts.counts_KC.size
    assert {tuple(line) for line in saved[1:]} == {
        (str(client), str(label), str(counts.counts_KC[client, label]))
        for client in range(len(counts.counts_KC))
        for label in range(counts.counts_KC.shape[1])
    }


def test_picture_is_saved_as_a_file_of_its_own(browser: Browser) -> None:
    browser.click("document.querySelector('figure .tools button')")
    root = ElementTree.parse(browser.downloaded(".svg")).getroot()
    assert root.tag == "{http://www.w3.org/2000/svg}svg"
    texts = {"".join(element.itertext()).strip() for element in root.iter("{http://www.w3.org/2000/svg}text")}
    assert {"test accuracy", "round", "FedAvg"} <= texts


@pytest.mark.parametrize("width", [320, 800, 1400])
def test_letters_can_be_read_at_every_width(browser: Browser, width: int) -> None:
    browser.resize(width)
    assert browser.value_of("document.documentElement.scrollWidth") <= width, "nothing lies beside the page"
    heights = browser.value_of(
        "[...document.querySelectorAll('.picture text')].filter(text => text.textContent.trim()"
        " && text.checkVisibility()).map(text => text.getBoundingClientRect().height)"
    )
    assert min(heights) > 8, "in pixels, of the smallest letters"
    shown = browser.value_of("[...document.querySelectorAll('.narrow')].some(one => one.checkVisibility())")
    assert shown == (width == 320)


def test_paper_has_the_wide_pictures_and_no_tools(browser: Browser) -> None:
    browser.resize(320)
    browser.call("Emulation.setEmulatedMedia", media="print")
    for part, is_shown in ((".wide", True), (".narrow", False), (".tools", False)):
        assert browser.value_of(f"document.querySelector('{part}').checkVisibility()") == is_shown, part


def test_page_reads_without_its_script(browser: Browser, page: Path) -> None:
    browser.call("Emulation.setScriptExecutionDisabled", value=True)
    browser.load(page)
    document = browser.call("DOM.getDocument", depth=0)["root"]["nodeId"]
    html = browser.call("DOM.getOuterHTML", nodeId=document)["outerHTML"]
    assert "<td" in html
    assert 'class="tools"' not in html

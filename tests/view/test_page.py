"""The page in a real browser."""

import shutil
import time

import pytest
import torch

from tests.view.common import make_data, make_trace
from torch_geometric_idgl.view import GraphView

webdriver = pytest.importorskip('selenium.webdriver', reason='needs selenium')
pytestmark = pytest.mark.browser

SECONDS = 60


@pytest.fixture(scope='module')
def browser():
    chromium = shutil.which('chromium') or shutil.which('google-chrome')
    chromedriver = shutil.which('chromedriver')
    if chromium is None or chromedriver is None:
        pytest.skip("needs a browser: 'chromium' and 'chromedriver' (not found)")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in [
        '--headless=new',
        '--no-sandbox',  # which cannot be had as root
        '--disable-dev-shm-usage',
        '--use-angle=swiftshader',  # WebGL without a graphics card
        '--enable-unsafe-swiftshader',
        '--window-size=1000,700',
    ]:
        options.add_argument(argument)
    options.set_capability('goog:loggingPrefs', {'browser': 'ALL'})
    service = webdriver.ChromeService(chromedriver)
    driver = webdriver.Chrome(options=options, service=service)
    driver.set_page_load_timeout(SECONDS)
    driver.set_script_timeout(SECONDS)
    yield driver
    driver.quit()


@pytest.fixture
def page(browser, tmp_path):
    data = make_data()
    names = ['red', 'green', '</script>']
    path = tmp_path / 'graph.html'
    make_trace(data, backend='dense').view(data, path, class_names=names)
    browser.get_log('browser')  # what others have left
    browser.get(path.as_uri())
    yield browser
    assert browser.get_log('browser') == []


def text(page, name):
    return page.find_element('id', name).text


def press(page, name, *keys):
    """Presses keys on a control and waits for the next drawing."""
    page.find_element('id', name).send_keys(*keys)
    page.execute_async_script(
        'requestAnimationFrame(() => requestAnimationFrame(arguments[0]))'
    )


def drawn(page):
    """The edges that are drawn, and the picture."""
    edges = page.execute_script(
        'return viewer.graph().mapEdges((e, _, s, t) => [Number(s), Number(t)])'
    )
    return sorted(edges), page.find_element('id', 'drawing').screenshot_as_png


def test_loads(page):
    assert page.title == 'Learned graph'
    assert page.find_elements('css selector', '#drawing canvas')
    assert text(page, 'step-text') == 'Refinement 2'
    assert 'red, 4 nodes' in text(page, 'legend')
    assert '</script>, 4 nodes' in text(page, 'legend')
    assert '% of this graph, 0.0 % of the initial one' in text(page, 'share-text')
    assert 'by chance 27.3 %' in text(page, 'share-note')


def test_sliders_change_what_is_drawn(page):
    keys = webdriver.Keys
    press(page, 'amount', keys.END)
    every, picture = drawn(page)
    assert text(page, 'amount-text').startswith(f'{len(every)} of {len(every)}, weight')

    press(page, 'amount', keys.HOME)
    one, other = drawn(page)
    assert len(one) == 1 and one[0] in every
    assert other != picture
    assert text(page, 'amount-text').startswith(f'1 of {len(every)}, weight')

    press(page, 'amount', keys.END)
    press(page, 'step', keys.HOME)
    initial, other = drawn(page)
    assert text(page, 'step-text') == 'Initial graph'
    assert text(page, 'share-text') == '0.0 % of this graph'
    assert len(initial) == 12 and initial != every
    assert other != picture
    press(page, 'step', keys.ARROW_RIGHT)
    assert text(page, 'step-text') == 'First learned graph'


def test_hover_shows_neighbours(page):
    keys = webdriver.Keys
    press(page, 'amount', keys.END)
    _, picture = drawn(page)
    point_at(page, 5, 'Node 5, </script>')
    assert drawn(page)[1] != picture

    check_neighbours(page, 5)
    press(page, 'step', keys.HOME)
    rows = check_neighbours(page, 5)
    assert sorted(row[0] for row in rows) == ['4', '6']
    assert {row[-1] for row in rows} == {'initial'}


def test_near_a_node_is_enough(page):
    point_at(page, 7, 'Node 7, green', aside=10)


def point_at(page, node, wanted, aside=0):
    """Moves the mouse to a node until the page says what is wanted."""
    x, y = page.execute_script(
        'const at = viewer.graph().getNodeAttributes(arguments[0]);'
        'const {x, y} = viewer.renderer.graphToViewport(at);'
        "const box = document.getElementById('drawing').getBoundingClientRect();"
        'return [x - box.width / 2, y - box.height / 2]',
        node,
    )
    drawing = page.find_element('id', 'drawing')
    end = time.monotonic() + SECONDS
    while text(page, 'node-text') != wanted and time.monotonic() < end:
        for off in [1, 0]:  # A hand is never quite still.
            actions = webdriver.ActionChains(page, duration=50)
            place = round(x) + aside + off, round(y)
            actions.move_to_element_with_offset(drawing, *place).perform()
    assert text(page, 'node-text') == wanted


def check_neighbours(page, node):
    rows = page.find_elements('css selector', '#neighbours tbody tr')
    rows = [[c.text for c in row.find_elements('tag name', 'td')] for row in rows]
    assert len(rows) > 0
    weights = [float(row[2]) for row in rows]
    assert weights == sorted(weights, reverse=True)
    for other, label, _, kind in rows:
        assert label == ['red', 'green', '</script>'][int(other) % 3]
        assert kind == ('initial' if abs(int(other) - node) == 1 else 'new')
    return rows


def test_node_by_keyboard(page):
    press(page, 'node', '7')
    assert text(page, 'node-text') == 'Node 7, green'
    check_neighbours(page, 7)
    press(page, 'node', '7')  # there is no node 77
    assert text(page, 'node-text') == 'Node 7, green'


def test_ten_thousand_nodes(browser, tmp_path):
    """As large as a page has to be: it loads, and sliders and nodes answer."""
    n, steps = 10_000, 3
    generator = torch.Generator().manual_seed(0)
    node = torch.arange(n).repeat_interleave(5)
    jump = torch.tensor([1, 10, 100, 1000, 3000]).repeat(n)  # five edges of each node
    pair = torch.stack([node, (node + jump) % n]).sort(dim=0).values
    view = GraphView(
        title='Many',
        steps=['Initial graph', 'First learned graph', 'Refinement 1'],
        edges=[pair] * steps,
        weights=[torch.linspace(1.0, 0.5, pair.size(1))] * steps,
        initial=[torch.arange(pair.size(1)) % 2 == 0] * steps,
        shares=[0.5] * steps,
        chance=0.25,
        pos=torch.randn(n, 2, generator=generator),
        k=5,
        y=torch.arange(n) % 7,
    )
    path = tmp_path / 'many.html'
    view.write(path)
    assert path.stat().st_size < 5e6
    browser.get_log('browser')  # what others have left
    browser.get(path.as_uri())  # within the time limit of the driver
    assert text(browser, 'summary').startswith('10,000 nodes')
    keys = webdriver.Keys
    press(browser, 'amount', keys.END)
    assert len(drawn(browser)[0]) == pair.size(1)
    press(browser, 'step', keys.HOME)
    assert text(browser, 'step-text') == 'Initial graph'
    press(browser, 'amount', keys.HOME)
    assert drawn(browser)[0] == [pair[:, 0].tolist()]
    press(browser, 'node', '9999')
    assert text(browser, 'node-text') == f'Node 9999, class {9999 % 7}'
    assert browser.get_log('browser') == []

'use strict';
(() => {
  const $ = (id) => document.getElementById(id);
  const data = JSON.parse($('data').textContent);

  // Colours that colour-blind people can tell apart (Okabe and Ito, then Tol).
  const COLOURS = [
    '#0072b2', '#e69f00', '#009e73', '#cc79a7', '#d55e00', '#56b4e9', '#b8a800',
    '#332288', '#882255', '#44aa99', '#999933', '#aa4499',
  ];
  const UNKNOWN = '#777777';
  const EDGES = { initial: '#5c5c5c', fresh: '#f0a58c', chosen: '#000000' };
  // The sizes of nodes and edges, in pixels, of large and of small graphs.
  const MANY = { size: 2.2, edge: 1 }, FEW = { size: 6, edge: 2 };

  const REACH = 12; // of the pointer, in pixels

  function decode(text, Type) {
    const bytes = Uint8Array.from(atob(text), (c) => c.charCodeAt(0));
    return new Type(bytes.buffer);
  }
  const n = data.numNodes;
  const pos = decode(data.pos, Float32Array);
  const y = data.y === null ? null : decode(data.y, Int32Array);
  const steps = data.steps.map((step) => ({
    name: step.name,
    share: step.share,
    source: decode(step.source, Int32Array),
    target: decode(step.target, Int32Array),
    weight: decode(step.weight, Float32Array),
    initial: decode(step.initial, Uint8Array),
    neighbours: null, // of each node, when first asked for
  }));
  const small = Math.max(0, 1 - n / 1500);
  const style = {
    size: MANY.size + (FEW.size - MANY.size) * small,
    edge: MANY.edge + (FEW.edge - MANY.edge) * small,
  };

  // Names and numbers ---------------------------------------------------------------
  const className = (c) =>
    c < 0 ? 'unknown' : data.classNames ? data.classNames[c] : `class ${c}`;
  const classColour = (c) => (c < 0 ? UNKNOWN : COLOURS[c % COLOURS.length]);
  const nodeColour = (i) => (y ? classColour(y[i]) : COLOURS[0]);
  const nodeName = (i) => (data.nodeNames ? `${data.nodeNames[i]} (${i})` : String(i));
  const percent = (x) => `${(100 * x).toFixed(1)} %`;
  const count = (x) => x.toLocaleString('en');
  const weightText = (x) => Number(x.toPrecision(3)).toString();

  function element(tag, text, className_) {
    const made = document.createElement(tag);
    if (text !== undefined) made.textContent = text;
    if (className_) made.className = className_;
    return made;
  }
  function mark(kind, colour) {
    const made = element('span', undefined, kind);
    made.style.background = colour;
    return made;
  }

  // The graph that is drawn: the strongest edges of one iteration --------------------
  const state = { step: steps.length - 1, drawn: 0, node: null };
  let graph, renderer;

  function build() {
    const step = steps[state.step];
    const total = step.weight.length;
    const part = Number($('amount').value) / 100;
    state.drawn = total === 0 ? 0 : Math.max(1, Math.round(total * part * part));
    graph = new graphology.UndirectedGraph();
    for (let i = 0; i < n; i++) {
      graph.addNode(i, {
        x: pos[2 * i], y: pos[2 * i + 1], size: style.size,
        color: nodeColour(i), label: nodeName(i),
      });
    }
    // The strongest come last, and so on top.
    for (let e = state.drawn - 1; e >= 0; e--) {
      graph.addEdgeWithKey(e, step.source[e], step.target[e], {
        size: style.edge, color: step.initial[e] ? EDGES.initial : EDGES.fresh,
      });
    }
    highlight();
  }

  function highlight() {
    if (state.node === null) return;
    const step = steps[state.step];
    for (const e of neighboursOf(state.node)) {
      if (e < state.drawn) {
        graph.mergeEdgeAttributes(e, { size: 2.5, color: EDGES.chosen });
      }
      const other = otherEnd(step, e, state.node);
      graph.setNodeAttribute(other, 'size', 2 * style.size + 1);
    }
    graph.setNodeAttribute(state.node, 'size', 2 * style.size + 3);
  }

  function unhighlight() {
    if (state.node === null) return;
    const step = steps[state.step];
    for (const e of neighboursOf(state.node)) {
      if (e < state.drawn) {
        const color = step.initial[e] ? EDGES.initial : EDGES.fresh;
        graph.mergeEdgeAttributes(e, { size: style.edge, color });
      }
      graph.setNodeAttribute(otherEnd(step, e, state.node), 'size', style.size);
    }
    graph.setNodeAttribute(state.node, 'size', style.size);
  }

  const otherEnd = (step, e, i) =>
    step.source[e] === i ? step.target[e] : step.source[e];

  // All edges of a node that are kept, strongest first.
  function neighboursOf(i) {
    const step = steps[state.step];
    if (step.neighbours === null) {
      step.neighbours = Array.from({ length: n }, () => []);
      for (let e = 0; e < step.weight.length; e++) {
        step.neighbours[step.source[e]].push(e);
        step.neighbours[step.target[e]].push(e);
      }
    }
    return step.neighbours[i];
  }

  function drawnShare(step) {
    let within = 0, total = 0;
    for (let e = 0; e < state.drawn; e++) {
      const here = y[step.source[e]], there = y[step.target[e]];
      if (here < 0 || there < 0) continue;
      total += step.weight[e];
      if (here === there) within += step.weight[e];
    }
    return total > 0 ? within / total : null;
  }

  // What is said about it -----------------------------------------------------------
  function describe() {
    const step = steps[state.step];
    const total = step.weight.length;
    $('step').setAttribute('aria-valuetext', step.name);
    $('step-text').textContent = step.name;
    const least = state.drawn > 0 ? step.weight[state.drawn - 1] : 0;
    const amount = total === 0 ? 'none'
      : `${count(state.drawn)} of ${count(total)}, weight at least ${weightText(least)}`;
    $('amount-text').textContent = amount;
    $('amount').setAttribute('aria-valuetext', amount);
    if (y) {
      const share = step.share === null ? 'no weight' : percent(step.share);
      const before = steps[0].share;
      $('share-text').textContent = state.step === 0 || before === null
        ? `${share} of this graph`
        : `${share} of this graph, ${percent(before)} of the initial one`;
      const drawn = drawnShare(step);
      $('drawn-text').textContent =
        drawn === null ? 'nothing drawn' : `${percent(drawn)} of what is drawn`;
      $('share-note').textContent = 'All pairs count for the graph, drawn or not'
        + (data.chance === null ? '.' : `; by chance ${percent(data.chance)}.`);
      $('share').hidden = false;
    }
  }

  function tell() {
    const table = $('neighbours');
    const i = state.node;
    if (i === null) return;
    const step = steps[state.step];
    const own = neighboursOf(i).slice(0, 10);
    $('node').value = i;
    const what = y ? `, ${className(y[i])}` : '';
    const name = data.nodeNames ? data.nodeNames[i] : `Node ${i}`;
    $('node-text').textContent =
      `${name}${what}${own.length ? '' : ': no neighbours'}`;
    const rows = own.map((e) => {
      const row = element('tr');
      const other = otherEnd(step, e, i);
      row.append(element('td', nodeName(other)));
      if (y) {
        const cell = element('td');
        cell.append(mark('dot', classColour(y[other])), className(y[other]));
        row.append(cell);
      }
      row.append(element('td', weightText(step.weight[e])));
      row.append(element('td', step.initial[e] ? 'initial' : 'new'));
      return row;
    });
    table.tBodies[0].replaceChildren(...rows);
    table.hidden = own.length === 0;
  }

  function select(i) {
    if (i === state.node) return;
    unhighlight();
    state.node = i;
    highlight();
    tell();
  }

  // Nodes of large graphs are small: one that is near counts as pointed at.
  function nearest({ x, y: top }) {
    const here = renderer.viewportToGraph({ x, y: top });
    const edge = renderer.viewportToGraph({ x: x + REACH, y: top });
    let least = (edge.x - here.x) ** 2 + (edge.y - here.y) ** 2;
    let found = null;
    for (let i = 0; i < n; i++) {
      const dist = (pos[2 * i] - here.x) ** 2 + (pos[2 * i + 1] - here.y) ** 2;
      if (dist < least) [least, found] = [dist, i];
    }
    return found;
  }

  // Slider events come faster than large graphs are drawn: one frame, one drawing.
  let waiting = false;
  function redraw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      state.step = Number($('step').value);
      build();
      renderer.setGraph(graph);
      describe();
      tell();
    });
  }

  function legend() {
    const items = [];
    const add = (sign, text) => {
      const item = element('li');
      item.append(sign, text);
      items.push(item);
    };
    if (y) {
      const sizes = new Map();
      for (const c of y) sizes.set(c, (sizes.get(c) || 0) + 1);
      for (const c of [...sizes.keys()].sort((a, b) => a - b)) {
        const nodes = `${count(sizes.get(c))} nodes`;
        add(mark('dot', classColour(c)), `${className(c)}, ${nodes}`);
      }
    } else {
      add(mark('dot', COLOURS[0]), 'node');
    }
    add(mark('line', EDGES.initial), 'edge of the initial graph');
    add(mark('line', EDGES.fresh), 'new edge');
    $('legend').append(...items);
  }

  // Start -----------------------------------------------------------------------------
  $('summary').textContent =
    `${count(n)} nodes, the ${data.k} strongest edges of each`;
  $('step').max = steps.length - 1;
  $('step').value = state.step;
  $('node').max = n - 1;
  for (const cell of document.querySelectorAll('.of-class')) cell.hidden = !y;
  legend();
  build();
  describe();
  try {
    renderer = new Sigma(graph, $('drawing'), {
      renderLabels: false,
      minEdgeThickness: 0.3,
      stagePadding: 20,
    });
  } catch (error) {
    $('drawing').append(
      element('p', `This browser cannot draw with WebGL: ${error.message}`, 'error'),
    );
    throw error;
  }
  let over = false; // a node
  renderer.on('enterNode', ({ node }) => {
    over = true;
    select(Number(node));
  });
  renderer.on('leaveNode', () => { over = false; });
  renderer.on('moveBody', ({ event }) => {
    const i = over ? null : nearest(event);
    if (i !== null) select(i);
  });
  $('step').addEventListener('input', redraw);
  $('amount').addEventListener('input', redraw);
  $('node').addEventListener('input', (event) => {
    const i = event.target.valueAsNumber;
    if (Number.isInteger(i) && i >= 0 && i < n) select(i);
  });
  $('reset').addEventListener('click', () => renderer.getCamera().animatedReset());
  window.viewer = { renderer, state, graph: () => graph };
})();

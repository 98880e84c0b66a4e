"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const count = data.tokens.length;
  const $ = id => document.getElementById(id);
  const bytes = text => Uint8Array.from(atob(text), x => x.charCodeAt(0));
  const shown = label => label.trim() || label.replaceAll("\n", "⏎").replaceAll(" ", "␣");
  const number = (x, digits = 3) => {
    const text = x === 0 ? "0" : Math.abs(x) < 0.5 * 10 ** -digits ? x.toExponential(1) : x.toFixed(digits);
    return text.replaceAll("-", "−");
  };
  const weightOf = x => number(x, 4);
  const percent = x => `${(100 * x).toFixed(x < 0.000995 ? 2 : x < 0.0995 ? 1 : 0)} %`;

  // ---- What is kept of a head, decoded when it is first chosen ----------------------------------------------------
  const decodedMap = packed => packed && {
    index: new Uint16Array(bytes(packed.index).buffer), level: new Int8Array(bytes(packed.level).buffer),
    scale: new Float32Array(bytes(packed.scale).buffer), share: bytes(packed.share),
    beside: packed.beside && new Int16Array(bytes(packed.beside).buffer),
  };
  const decodedSeries = packed => packed && Float32Array.from(new Uint16Array(bytes(packed.values).buffer), x => x / 65535 * packed.most);

  function decoded(head) {
    if (head.decoded) return head.decoded;
    const gates = Object.fromEntries(Object.entries(head.gates).map(([name, parts]) =>
      [name, Object.fromEntries(Object.entries(parts).map(([part, x]) => [part, decodedSeries(x)]))]));
    const along = {erased: {mean: decodedSeries(head.erased)}, correction: {mean: decodedSeries(head.correction)}, ...gates};
    if (head.strength !== null) along.strength = {mean: new Float32Array(count).fill(head.strength)};
    head.decoded = {read: decodedMap(head.read), lost: decodedMap(head.lost), along, state: bytes(head.state.values), maps: {}};
    return head.decoded;
  }

  // The kept sources of token t in a map, strongest first: a source's place and value. Of what was erased also the weight
  // that is read, which `reading` is the map of, and whether that is the larger one of the two, so that `grown` is true.
  function sources(map, t, reading) {
    const kept = data.sources, found = [];
    for (let i = t * kept; i < (t + 1) * kept; i++) {
      if (map.level[i] === 0) continue;
      const value = map.level[i] / 127 * map.scale[t], weight = map.beside ? map.beside[i] / 32767 * reading.scale[t] : value;
      found.push({place: map.index[i], value, weight, grown: Math.abs(weight) > Math.abs(weight + value)});
    }
    return found;
  }

  // ---- What is chosen --------------------------------------------------------------------------------------------
  let head = data.heads[0], chosen = count - 1, held = false, marked = [];
  const tokens = [];

  function build() {
    const strongest = Math.max(...data.heads.map(x => x.change || 0), 1e-30);
    data.heads.forEach((x, i) => {
      const label = document.createElement("label"), input = document.createElement("input"), text = document.createElement("span");
      Object.assign(input, {type: "radio", name: "head", value: i, checked: i === 0});
      text.textContent = `Layer ${x.layer}, head ${x.head}` + (x.change === null ? "" : ` · ${percent(x.change)}`);
      text.style.setProperty("--part", (x.change || 0) / strongest);
      input.addEventListener("change", () => { head = x; update(); });
      label.append(input, text);
      $("heads").append(label);
    });
    const unknown = new Set(data.unknown);
    data.tokens.forEach((label, t) => {
      const token = document.createElement("span"), body = label.trim();
      const space = body ? label.slice(0, label.length - label.trimStart().length) : "";
      token.className = unknown.has(t) ? "token unknown" : "token";
      token.id = `token-${t}`;
      token.setAttribute("role", "option");
      token.textContent = body || shown(label);
      token.dataset.token = t;
      tokens.push(token);
      $("text").append(space, token, !body && label.includes("\n") ? "\n" : "");
    });
    for (const [name, title, what] of STRIPS) {
      const figure = document.createElement("figure"), caption = document.createElement("figcaption");
      figure.className = name === "strength" ? "strip level" : "strip";
      figure.id = `strip-${name}`;
      const bold = document.createElement("b"), said = document.createElement("output"), canvas = document.createElement("canvas");
      bold.textContent = title;
      canvas.setAttribute("role", "img");
      canvas.setAttribute("aria-label", `${title} along the text`);
      caption.append(bold, ` ${what} `, said);
      figure.append(caption, canvas);
      $("strips").append(figure);
    }
  }

  const STRIPS = [
    ["erased", "Change of what is read", "at the token: Σ|A with λ = 0, less A| / Σ|A with λ = 0| over its sources."],
    ["correction", "‖correction‖ / ‖a‖", "is the part of the erase vector that λ adds."],
    ["strength", "λ", `is one number for the head, learned, of at most ${data.bound}.`],
    ["b", "Erase gate b", "says how much of what is stored at the key is erased."],
    ["w", "Write gate w", "says how much of the value is written."],
    ["decay", "Decay exp g", "is the factor by which the state fades at the token; 1 keeps everything."],
  ];

  // ---- The text and what is said beside it ------------------------------------------------------------------------
  function mark() {
    const {read, lost} = decoded(head);
    for (const token of marked) {
      token.classList.remove("negative", "gained", "chosen");
      token.removeAttribute("style");
      token.removeAttribute("aria-selected");
    }
    const reads = sources(read, chosen), losses = lost ? sources(lost, chosen, read) : [];
    for (const {place, value} of reads) {
      tokens[place].style.setProperty("--size", Math.abs(value) / read.scale[chosen]);
      tokens[place].classList.toggle("negative", value < 0);
    }
    for (const {place, value, grown} of losses) {
      tokens[place].style.setProperty("--bar", Math.abs(value) / lost.scale[chosen]);
      tokens[place].classList.toggle("gained", grown);
    }
    tokens[chosen].classList.add("chosen");
    tokens[chosen].setAttribute("aria-selected", "true");
    marked = [...reads, ...losses].map(x => tokens[x.place]).concat(tokens[chosen]);
    tokens.forEach((token, t) => token.classList.toggle("after", t > chosen));
    $("text").setAttribute("aria-activedescendant", tokens[chosen].id);
    tell(reads, losses);
  }

  function element(name, text, properties = {}) {
    const made = Object.assign(document.createElement(name), properties);
    if (text !== null) made.textContent = text;
    return made;
  }

  function table(id, titles, rows) {
    const made = element("table", null, {id}), top = element("tr", null);
    top.append(...titles.map(title => element("th", title)));
    const body = element("tbody", null);
    for (const {place, cells, part, of} of rows) {
      const row = element("tr", null, {onclick: () => choose(place, true)});
      row.dataset.token = place;
      row.append(element("td", place === chosen ? "itself" : `${shown(data.tokens[place])}  (${place})`));
      row.append(...cells.map(cell => element("td", cell)));
      row.lastChild.className = "bar";
      row.lastChild.style.setProperty("--part", part);
      row.lastChild.style.setProperty("--of", `var(--${of})`);
      body.append(row);
    }
    const head = element("thead", null);
    head.append(top);
    made.append(head, body);
    return made;
  }

  const guesses = row => row.filter(([, share], i) => i === 0 || share >= 0.001).map(([name, share]) => `${name.trim() || name} ${percent(share)}`).join(", ");

  function tell(reads, losses) {
    const {read, lost} = decoded(head), here = $("detail"), most = read.scale[chosen];
    here.replaceChildren(element("h3", `Token ${chosen}: ${shown(data.tokens[chosen])}`));
    here.append(element("p", `The model expects next: ${guesses(data.expected[chosen])}.`));
    if (data.without) here.append(element("p", `With λ = 0 in all layers: ${guesses(data.without[chosen])}.`, {className: "quiet"}));
    here.append(element("h4", "It reads most"));
    here.append(table("reads", ["token (place)", "weight"], reads.slice(0, 6).map(({place, value}) =>
      ({place, cells: [weightOf(value)], part: Math.abs(value) / most, of: value < 0 ? "against" : "read"}))));
    here.append(element("p", `Shown here and in the text are ${percent(read.share[chosen] / 255)} of its weights.`, {className: "note"}));
    if (!lost) return;
    here.append(element("h4", "Its weights that changed most"));
    if (!losses.length) {
      here.append(element("p", chosen === 0 ? "Nothing: there is nothing before it." : "Nothing that can be measured."));
      return;
    }
    here.append(table("losses", ["token (place)", "λ = 0", "with λ", "change"], losses.slice(0, 6).map(({place, value, weight, grown}) =>
      ({place, cells: [value + weight, weight, -value].map(weightOf), part: Math.abs(value) / lost.scale[chosen], of: grown ? "added" : "lost"}))));
    const times = most / lost.scale[chosen];
    here.append(element("p", `Shown are ${percent(lost.share[chosen] / 255)} of all changes. The largest bar is worth ` +
      (times >= 1.05 ? `${times.toFixed(times < 9.5 ? 1 : 0)} times less than` : "as much as") + " the strongest shading.", {className: "note"}));
  }

  // ---- Charts ----------------------------------------------------------------------------------------------------
  const MARGIN = 46;
  const colour = name => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
  const ground = document.createElement("canvas").getContext("2d", {willReadFrequently: true});
  function rgb(name) {
    ground.fillStyle = colour(name);
    ground.fillRect(0, 0, 1, 1);
    return ground.getImageData(0, 0, 1, 1).data;
  }

  function pen(canvas) {
    const {width, height} = canvas.getBoundingClientRect(), ratio = window.devicePixelRatio || 1;
    canvas.width = Math.round(width * ratio);
    canvas.height = Math.round(height * ratio);
    const context = canvas.getContext("2d");
    context.scale(ratio, ratio);
    context.font = "12px system-ui, sans-serif";
    return {context, width, height};
  }

  const across = (t, width) => MARGIN + (t + 0.5) / count * (width - MARGIN);

  function cursor(context, width, height) {
    context.fillStyle = colour("--ink");
    context.fillRect(across(chosen, width) - 0.75, 0, 1.5, height);
  }

  function line(context, values, x, y) {
    context.beginPath();
    values.forEach((value, t) => context.lineTo(x(t), y(value)));
    if (count === 1) context.lineTo(x(0) + 3, y(values[0]));
    context.stroke();
  }

  function strip(name) {
    const figure = $(`strip-${name}`), parts = decoded(head).along[name];
    figure.hidden = !(parts && parts.mean);
    if (figure.hidden) return;
    const {mean, low, high} = parts, {context, width, height} = pen(figure.querySelector("canvas"));
    const ranged = low || mean;
    const least = name === "decay" ? Math.min(...ranged) : 0;
    const most = name === "decay" || name === "b" || name === "w" ? 1 : name === "strength" ? data.bound : Math.max(...mean, 1e-9);
    const span = Math.max(most - least, 1e-6), y = value => 4 + (1 - (value - least) / span) * (height - 8);
    const x = t => across(t, width);
    context.fillStyle = colour("--quiet");
    context.textAlign = "right";
    context.textBaseline = "top";
    context.fillText(number(most), MARGIN - 6, 1);
    context.textBaseline = "bottom";
    if (height > 40) context.fillText(number(least), MARGIN - 6, height);
    context.strokeStyle = context.fillStyle = name === "erased" || name === "correction" || name === "strength" ? colour("--lost") : colour("--read");
    if (low) {
      context.globalAlpha = 0.22;
      context.beginPath();
      high.forEach((value, t) => context.lineTo(x(t), y(value)));
      for (let t = count - 1; t >= 0; t--) context.lineTo(x(t), y(low[t]));
      context.fill();
      context.globalAlpha = 1;
    }
    context.lineWidth = 1.5;
    line(context, mean, x, y);
    cursor(context, width, height);
    figure.querySelector("output").textContent = number(mean[chosen]) +
      (low ? ` (${number(low[chosen])} to ${number(high[chosen])})` : "");
  }

  // Every kept source of the chosen token, where it stands in the text: weights upwards, their changes downwards.
  function sourcesAlong() {
    const {read, lost} = decoded(head), {context, width, height} = pen($("sources"));
    const middle = lost ? height * 0.58 : height - 2, bar = Math.max(1.5, (width - MARGIN) / count - 1);
    const bars = (kept, room, sign, colours, isOther) => {
      for (const x of kept) {
        const size = Math.abs(x.value) / room.scale[chosen] * (sign > 0 ? middle - 4 : height - middle - 4);
        context.fillStyle = colour(colours[isOther(x) ? 1 : 0]);
        context.fillRect(across(x.place, width) - bar / 2, sign > 0 ? middle - size : middle + 1, bar, size);
      }
    };
    bars(sources(read, chosen), read, 1, ["--read", "--against"], x => x.value < 0);
    if (lost) bars(sources(lost, chosen, read), lost, -1, ["--lost", "--added"], x => x.grown);
    context.fillStyle = colour("--line");
    context.fillRect(MARGIN, middle, width - MARGIN, 1);
    context.fillStyle = colour("--quiet");
    context.textAlign = "right";
    context.textBaseline = "top";
    context.fillText(number(read.scale[chosen]), MARGIN - 6, 2);
    context.textBaseline = "bottom";
    if (lost) context.fillText(number(lost.scale[chosen]), MARGIN - 6, height - 1);
    cursor(context, width, height);
  }

  function picture(key, width, height, paint) {
    const kept = decoded(head).maps, dark = matchMedia("(prefers-color-scheme: dark)").matches, name = `${key}-${dark}`;
    if (!kept[name]) {
      const canvas = Object.assign(document.createElement("canvas"), {width, height}), context = canvas.getContext("2d");
      const image = context.createImageData(width, height);
      paint((x, y, [r, g, b], strength) => image.data.set([r, g, b, Math.round(255 * strength)], 4 * (y * width + x)));
      context.putImageData(image, 0, 0);
      kept[name] = canvas;
    }
    return kept[name];
  }

  function state() {
    const {rows, together, most, stride} = head.state, values = decoded(head).state, columns = values.length / rows;
    const blue = rgb("--read"), {context, width, height} = pen($("state"));
    const image = picture("state", columns, rows, put => {
      values.forEach((value, i) => put(Math.floor(i / rows), i % rows, blue, value / 255));
    });
    context.imageSmoothingEnabled = false;
    const end = columns * stride;  // the last column may stand for fewer tokens than the others
    context.save();
    context.beginPath();
    context.rect(MARGIN, 0, width - MARGIN, height);
    context.clip();
    context.drawImage(image, MARGIN, 0, (width - MARGIN) * end / count, height);
    context.restore();
    context.fillStyle = colour("--quiet");
    context.textAlign = "right";
    context.textBaseline = "top";
    context.fillText("0", MARGIN - 6, 1);
    context.textBaseline = "bottom";
    context.fillText(String(rows * together - 1), MARGIN - 6, height);
    cursor(context, width, height);
    $("state-note").textContent = `A row for ${together === 1 ? "each key channel" : `${together} neighbouring key channels`}, ` +
      `a column for the state after ${stride === 1 ? "each token" : `every ${stride} tokens`}. The colour is the norm of that part of ` +
      `S, from 0 to ${number(most)} in full: how much is stored there.`;
  }

  function map(id, kept, plain, other, isOther) {
    const canvas = $(id);
    if (!canvas) return;
    canvas.parentElement.hidden = !kept;
    if (!kept) return;
    const {context, width, height} = pen(canvas), most = Math.max(...kept.scale, 1e-30);
    const colours = [rgb(plain), rgb(other)].map(x => [...x]);
    const image = picture(id, count, count, put => {
      for (let t = 0; t < count; t++) {
        for (const x of sources(kept, t, decoded(head).read)) put(x.place, t, colours[isOther(x) ? 1 : 0], Math.sqrt(Math.abs(x.value) / most));
      }
    });
    context.imageSmoothingEnabled = count > width;
    context.drawImage(image, 0, 0, width, height);
    const step = height / count;
    context.strokeStyle = colour("--ink");
    context.strokeRect(0.5, chosen * step - 0.5, Math.max(1, (chosen + 1) * step), step + 1);
  }

  // ---- Drawing, and choosing --------------------------------------------------------------------------------------
  let waiting = false;
  function draw() {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => {
      waiting = false;
      sourcesAlong();
      STRIPS.forEach(([name]) => strip(name));
      state();
      map("read-map", decoded(head).read, "--read", "--against", x => x.value < 0);
      map("lost-map", decoded(head).lost, "--lost", "--added", x => x.grown);
    });
  }

  function update() {
    mark();
    draw();
  }

  function choose(t, hold = held) {
    chosen = Math.min(Math.max(t, 0), count - 1);
    held = hold;
    $("pinned").textContent = held ? `Token ${chosen} is held; click it again, or press Escape, to let the mouse choose.` : "";
    update();
  }

  function reveal() {
    const box = $("text"), token = tokens[chosen];
    if (token.offsetTop < box.scrollTop || token.offsetTop + token.offsetHeight > box.scrollTop + box.clientHeight) {
      box.scrollTop = token.offsetTop - box.clientHeight / 2;
    }
  }

  // The token of the line above or below that is nearest to the chosen one.
  function beyond(direction) {
    const here = tokens[chosen], middle = here.offsetLeft + here.offsetWidth / 2;
    let line = null, best = chosen, nearest = Infinity;
    for (let t = chosen + direction; t >= 0 && t < count; t += direction) {
      const token = tokens[t];
      if (Math.abs(token.offsetTop - here.offsetTop) < here.offsetHeight / 2) continue;
      if (line === null) line = token.offsetTop;
      if (Math.abs(token.offsetTop - line) > here.offsetHeight / 2) break;
      const away = Math.abs(token.offsetLeft + token.offsetWidth / 2 - middle);
      if (away < nearest) [nearest, best] = [away, t];
    }
    return best;
  }

  const KEYS = {
    ArrowLeft: () => chosen - 1, ArrowRight: () => chosen + 1, ArrowUp: () => beyond(-1), ArrowDown: () => beyond(1),
    Home: () => 0, End: () => count - 1,
  };

  function listen() {
    const place = event => { const token = event.target.closest(".token"); return token ? Number(token.dataset.token) : null; };
    $("text").addEventListener("pointerover", event => {
      const t = place(event);
      if (t !== null && !held && event.pointerType === "mouse") choose(t);
    });
    $("text").addEventListener("click", event => {
      const t = place(event);
      if (t !== null) choose(t, !(held && t === chosen));
    });
    $("text").addEventListener("keydown", event => {
      if (event.key in KEYS) choose(KEYS[event.key]());
      else if (event.key === "Enter" || event.key === " ") choose(chosen, !held);
      else return;
      event.preventDefault();
      reveal();
    });
    document.addEventListener("keydown", event => { if (event.key === "Escape" && held) choose(chosen, false); });
    const follow = (canvas, token, events) => events.forEach(name => canvas.addEventListener(name, event => {
      const box = canvas.getBoundingClientRect();
      if (name === "click" || (!held && event.pointerType === "mouse")) {
        choose(Math.floor(token(event, box) * count));
        reveal();
      }
    }));
    for (const canvas of document.querySelectorAll(".strip canvas, .state canvas, #sources")) {
      follow(canvas, (event, box) => (event.clientX - box.left - MARGIN) / (box.width - MARGIN), ["pointermove", "click"]);
    }
    for (const canvas of document.querySelectorAll(".maps canvas")) {
      follow(canvas, (event, box) => (event.clientY - box.top) / box.height, ["pointermove", "click"]);
    }
    $("last").addEventListener("click", () => { choose(count - 1, true); reveal(); });
    if ($("most")) $("most").addEventListener("click", () => {
      const erased = decoded(head).along.erased.mean;
      if (erased) choose(erased.indexOf(Math.max(...erased)), true);
      reveal();
    });
    window.addEventListener("resize", draw);
    matchMedia("(prefers-color-scheme: dark)").addEventListener("change", draw);
  }

  build();
  listen();
  update();
  reveal();
})();

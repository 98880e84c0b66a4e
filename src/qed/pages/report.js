// Values under the pointer or the keyboard, and the examples behind a cell. Without this script all else is there.
"use strict";
(() => {
  const tip = document.getElementById("tip");
  let here = null;

  const hide = () => {
    tip.hidden = true;
    if (here) here.classList.remove("here");
    here = null;
  };
  const show = (mark, text, x, y) => {
    if (here && here !== mark) here.classList.remove("here");
    here = mark;
    mark.classList.add("here");
    tip.textContent = text;
    tip.hidden = false;
    const box = tip.getBoundingClientRect();
    tip.style.left = `${Math.max(4, Math.min(x + 12, innerWidth - box.width - 4))}px`;
    tip.style.top = `${y - box.height - 12 < 4 ? y + 16 : y - box.height - 12}px`;
  };

  // Charts: the nearest value to the pointer, or the next one by arrow key.
  for (const chart of document.querySelectorAll(".chart")) {
    const marks = [...chart.querySelectorAll(".mark")].map(element => {
      const [, x, y] = element.getAttribute("d").match(/^M([-\d.]+) ([-\d.]+)/);
      const title = element.querySelector("title");
      const text = `${element.parentNode.dataset.name} · ${title.textContent}`;
      title.remove();  // or the browser would show it a second time
      return { element, text, x: +x, y: +y };
    });
    const place = mark => new DOMPoint(mark.x, mark.y).matrixTransform(chart.getScreenCTM());
    const told = mark => {
      const at = place(mark);
      show(mark.element, mark.text, at.x, at.y);
    };
    chart.addEventListener("pointermove", event => {
      const at = new DOMPoint(event.clientX, event.clientY).matrixTransform(chart.getScreenCTM().inverse());
      let best = null, least = 20 ** 2;
      for (const mark of marks) {
        const far = (mark.x - at.x) ** 2 + (mark.y - at.y) ** 2;
        if (far < least) [best, least] = [mark, far];
      }
      if (best) told(best); else hide();
    });
    chart.addEventListener("pointerleave", hide);
    chart.addEventListener("blur", hide);
    chart.addEventListener("keydown", event => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (event.key === "Escape") hide();
      if (!step || !marks.length) return;
      event.preventDefault();
      const now = marks.findIndex(mark => mark.element === here);
      told(marks[(now + step + marks.length) % marks.length] || marks[0]);
    });
  }

  // Cells of heat maps and remarks say more under the pointer.
  for (const element of document.querySelectorAll("[data-said]")) {
    const tell = () => {
      const box = element.getBoundingClientRect();
      show(element, element.dataset.said, box.left + box.width / 2, box.top);
    };
    element.addEventListener("pointerenter", tell);
    element.addEventListener("focus", tell);
    element.addEventListener("pointerleave", hide);
    element.addEventListener("blur", hide);
  }
  addEventListener("scroll", hide, { passive: true, capture: true });

  // The examples behind a cell. The browser's own dialog closes with Escape and gives the focus back.
  const dialog = document.getElementById("examples");
  const { cells, prompts } = JSON.parse(document.getElementById("examples-data").textContent);
  const added = (parent, name, text, kind) => {
    const element = parent.appendChild(document.createElement(name));
    if (text !== undefined) element.textContent = text;
    if (kind) element.className = kind;
    return element;
  };
  const NAMES = { needle: "needle", question: "question", answer: "right answer", document: "document" };
  const filled = cell => {
    const body = dialog.querySelector(".body");
    body.replaceChildren();
    dialog.querySelector("h2").textContent = cell.title;
    dialog.querySelector(".count").textContent = cell.said;
    for (const [number, said, right] of cell.examples) {
      const prompt = prompts[number], part = added(body, "div", undefined, "example"), line = added(part, "p");
      added(line, "span", right ? "right" : "wrong", right ? "tag good" : "tag bad");
      let where = ` example ${prompt.example}`;
      if (prompt.tokens !== undefined) where += `, ${prompt.tokens.toLocaleString("en")} tokens`;
      if (prompt.depth !== undefined) where += `, needle at a depth of ${Math.round(prompt.depth)} %`;
      added(line, "span", where, "quiet");
      const list = added(part, "dl");
      for (const [name, title] of Object.entries(NAMES)) {
        if (prompt[name] === undefined) continue;
        added(list, "dt", title);
        added(list, "dd", prompt[name], "mono");
      }
      added(list, "dt", "the model said");
      added(list, "dd", said.trim() || "nothing", "mono");
    }
  };
  for (const button of document.querySelectorAll("button[data-examples]")) {
    button.addEventListener("click", () => {
      filled(cells[+button.dataset.examples]);
      dialog.showModal();
      dialog.scrollTop = 0;
    });
  }
  dialog.querySelector(".close").addEventListener("click", () => dialog.close());
  dialog.addEventListener("click", event => { if (event.target === dialog) dialog.close(); });
})();

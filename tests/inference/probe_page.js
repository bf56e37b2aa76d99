// Moves the mouse over a page of predictions and leaves what the page answers as its only text (test_target_page.py).
setTimeout(async () => {
  const answer = {};
  const wait = () => new Promise((done) => setTimeout(done, 300));
  const hover = (element, x, y) => {
    const box = element.getBoundingClientRect();
    const at = { clientX: box.left + box.width * x, clientY: box.top + box.height * y };
    element.dispatchEvent(new MouseEvent("mousemove", { bubbles: true, ...at }));
  };
  const count = (selector) => document.querySelectorAll(selector).length;
  const readout = () => document.getElementById("readout").textContent;
  const dark = () => {
    let [pixels, first, last] = [0, Infinity, -Infinity];
    const source = document.querySelector("#viewer canvas"), copy = document.createElement("canvas");
    [copy.width, copy.height] = [source.width, source.height];
    const context = copy.getContext("2d");
    context.drawImage(source, 0, 0);
    const { data } = context.getImageData(0, 0, copy.width, copy.height);
    for (let k = 0; k < data.length; k += 4) {
      if (!data[k + 3] || data[k] + data[k + 1] + data[k + 2] >= 700) continue;
      pixels++;
      first = Math.min(first, (k / 4) % copy.width);
      last = Math.max(last, (k / 4) % copy.width);
    }
    return { pixels, width: (last - first) / copy.width };
  };

  answer.drawn = dark().pixels;
  answer.width = dark().width;
  hover(document.getElementById("matrix"), 10.5 / 60, 20.5 / 60);
  await wait();
  answer.pair = readout();
  answer.lines = count("#cross line");
  hover(document.querySelector("svg.along"), (56 + (932 * 30.5) / 60) / 1000, 0.5);
  await wait();
  answer.residue = readout();
  answer.cursors = count(".cursor:not([hidden])");
  // The structure: 3Dmol asks which residue lies under the pointer when that has rested for half a second.
  document.getElementById("matrix").dispatchEvent(new MouseEvent("mouseleave"));
  await wait();
  const canvas = document.querySelector("#viewer canvas"), places = [];
  for (let x = 0.46; x < 0.55; x += 0.02) for (let y = 0.46; y < 0.55; y += 0.02) places.push([x, y]);
  answer.before = readout();
  for (const [x, y] of places) {
    hover(canvas, x, y);
    await new Promise((done) => setTimeout(done, 700));
    if (readout()) break;
  }
  answer.structure = readout();
  answer.marked = count("#cross line");
  answer.along = count(".cursor:not([hidden])");
  hover(document.querySelector("svg.along"), (56 + (932 * 30.5) / 60) / 1000, 0.5);
  await wait();
  document.querySelectorAll("#seeds button")[1].click();
  await wait();
  answer.other = readout();
  answer.shown = [...document.querySelectorAll(".plddt:not([hidden])")].map((line) => line.dataset.seed);
  answer.redrawn = dark().pixels;
  document.querySelectorAll("#seeds button")[2].click();
  await wait();
  answer.stretched = dark().pixels;
  answer.note = document.querySelector(".of-seed:not([hidden])").textContent;
  // How far the text of a heading is from the right-aligned one before it.
  const [text, number] = [document.querySelector("th.number + th:not(.number)"), document.querySelector("th.number")];
  answer.gap = parseFloat(getComputedStyle(number).paddingRight) + parseFloat(getComputedStyle(text).paddingLeft);
  document.body.textContent = "ANSWER" + JSON.stringify(answer) + "END";
}, 500);

// The page of a prediction: the structure in 3D, the matrix beside it and the charts below share one highlighted residue or pair.
// The data is in the element #prediction, as evodsp/inference/pages/target_page.py writes it.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("prediction").textContent);
  const length = data.sequence.length;
  const bytes = (text) => Uint8Array.from(atob(text), (letter) => letter.charCodeAt(0));
  const integers = (text) => new Int32Array(bytes(text).buffer);
  const atomType = bytes(data.atom_type), atomResidue = integers(data.atom_residue);
  const byId = (id) => document.getElementById(id);
  document.documentElement.classList.add("scripted");

  const chainOf = (residue) => data.chains.find((one) => residue < one.end);
  const colourOf = (plddt) => data.bands.find(([lower]) => plddt >= lower)[1];
  let byChain = false, wanted = null, seed = null, shape = null, carbons = null, matrix = null, viewer = null;

  // --- the structure ---------------------------------------------------------------------------------------------------------
  function mmcif(one, coordinates) {
    // 3Dmol reads mmCIF of any length, and finds the secondary structure itself.
    const items = "group_PDB id type_symbol label_atom_id label_comp_id label_asym_id label_seq_id auth_seq_id auth_asym_id " +
      "Cartn_x Cartn_y Cartn_z B_iso_or_equiv pdbx_PDB_model_num";
    const rows = ["data_prediction", "loop_", ...items.split(" ").map((item) => "_atom_site." + item)];
    for (let a = 0; a < atomType.length; a++) {
      const name = data.atom_names[atomType[a]], residue = atomResidue[a];
      const xyz = [0, 1, 2].map((axis) => (coordinates[3 * a + axis] / 1000).toFixed(3)).join(" ");
      const kind = data.residue_names[data.sequence[residue]], chain = chainOf(residue), number = residue - chain.start + 1;
      const place = `${chain.name} ${number} ${number} ${chain.name}`;
      rows.push(`ATOM ${a + 1} ${name[0]} ${name} ${kind} ${place} ${xyz} ${one.plddt[residue]} 1`);
    }
    return rows.join("\n") + "\n#\n";
  }

  function makeViewer() {
    const place = byId("viewer");
    try {
      if (!document.createElement("canvas").getContext("webgl2") && !document.createElement("canvas").getContext("webgl")) {
        throw new Error("no WebGL");
      }
      place.textContent = "";
      return $3Dmol.createViewer(place, { backgroundColor: "white", backgroundAlpha: 0, antialias: true });
    } catch (error) {
      place.innerHTML = "<p></p>";
      place.firstChild.textContent = "This browser cannot draw in 3D (" + error.message + "). The structure is in the file below.";
      return null;
    }
  }

  function fit() {
    // Turns the structure as the page's maker says, and comes as near as the box allows: each CA and the ribbon around it is seen.
    const { centre, axes, quaternion } = data.view, ribbon = 2.5;
    const high = Math.tan(viewer.fov * Math.PI / 360), box = byId("viewer"), wide = high * box.clientWidth / box.clientHeight;
    let distance = 0;
    for (const at of carbons.values()) {
      const [x, y, z] = axes.map((axis) => axis.reduce((sum, share, k) => sum + share * (at[k] - centre[k]), 0));
      distance = Math.max(distance, z + (Math.abs(x) + ribbon) / wide, z + (Math.abs(y) + ribbon) / high);
    }
    viewer.setView([...centre.map((value) => -value), viewer.CAMERA_Z - distance, ...quaternion]);
  }

  function draw(one, keepView) {
    const { coordinates: packed, traced } = one.shapes[shape], coordinates = integers(packed);
    carbons = new Map();
    for (let a = 0; a < atomType.length; a++) {
      if (data.atom_names[atomType[a]] === "CA") {
        carbons.set(atomResidue[a], [0, 1, 2].map((axis) => coordinates[3 * a + axis] / 1000));
      }
    }
    if (!viewer) return;
    const view = keepView ? viewer.getView() : null;
    viewer.removeAllModels();
    viewer.removeAllShapes();
    const model = viewer.addModel(mmcif(one, coordinates), "cif");
    // 3Dmol ends a ribbon where a bond is too long, by the number of the piece that it gives to each atom. A chain is one piece;
    // residues without atoms still leave a gap, because their numbers are missing.
    model.selectedAtoms({}).forEach((atom) => { atom.reschain = 0; });
    const starts = new Map(data.chains.map((chain) => [chain.name, chain.start]));
    const residueOf = (atom) => starts.get(atom.chain) + atom.resi - 1;
    const colorfunc = (atom) => byChain ? chainOf(residueOf(atom)).colour : colourOf(one.plddt[residueOf(atom)]);
    model.setStyle({}, { cartoon: { colorfunc, arrows: true, thickness: 0.35 } });
    for (const chain of traced) model.setStyle({ chain }, { cartoon: { colorfunc, style: "trace", thickness: 0.6 } });
    if (atomType.length < 20000) {
      model.setHoverable({}, true, (atom) => highlight(residueOf(atom), null), () => {});
    }
    if (view) viewer.setView(view); else { viewer.zoomTo(); fit(); }
    viewer.render();
  }

  function spheres(residues) {
    if (!viewer) return;
    viewer.removeAllShapes();
    for (const residue of residues) {
      const at = carbons.get(residue);
      if (at) viewer.addSphere({ center: { x: at[0], y: at[1], z: at[2] }, radius: 1.7, color: "#d6168b", opacity: 0.85 });
    }
    viewer.render();
  }

  // --- the matrix: aligned errors, or distances where the model has no head for errors -------------------------------------------
  function readMatrix(one) {
    const side = Math.ceil(length / data.step);
    if (one.pae) {
      const values = bytes(one.pae);
      return { side, step: data.step, unit: data.highest / 254, value: (i, j) => values[i * side + j] * data.highest / 254 };
    }
    const at = Array.from({ length: side }, (_, i) => carbons.get(Math.min(length - 1, i * data.step)));
    return {
      side, step: data.step,
      value: (i, j) => at[i] && at[j] ? Math.hypot(...at[i].map((x, axis) => x - at[j][axis])) : NaN,
    };
  }

  function paint() {
    const canvas = byId("matrix"), { side } = matrix;
    canvas.width = canvas.height = side;
    const context = canvas.getContext("2d"), image = context.createImageData(side, side);
    for (let i = 0; i < side; i++) {
      for (let j = 0; j < side; j++) {
        const share = Math.min(1, matrix.value(i, j) / data.highest), k = 4 * (i * side + j);
        if (Number.isNaN(share)) continue;
        const place = 3 * Math.round(share * 255);
        for (let c = 0; c < 3; c++) image.data[k + c] = data.palette[place + c];
        image.data[k + 3] = 255;
      }
    }
    context.putImageData(image, 0, 0);
    canvas.hidden = false;
  }

  // --- what is highlighted -------------------------------------------------------------------------------------------------------
  let chosen = [null, null], waiting = false;

  function highlight(i, j) {
    chosen = [i, j];
    if (waiting) return;
    waiting = true;
    setTimeout(() => { waiting = false; show(...chosen); }, 16); // the pointer moves more often than a screen draws
  }

  const numbered = (i) => {
    const { name, start } = chainOf(i);
    return data.chains.length > 1 ? `${name} ${i - start + 1}` : `${i + 1}`;
  };
  const called = (i) => `${data.residue_names[data.sequence[i]]} ${numbered(i)}`;

  function show(i, j) {
    const residues = [...new Set([i, j])].filter((residue) => residue !== null);
    const { charts } = data, width = (charts.width - charts.left - charts.right) / length;
    document.querySelectorAll(".cursor").forEach((line) => {
      line.toggleAttribute("hidden", i === null);
      if (i !== null) for (const end of ["x1", "x2"]) line.setAttribute(end, charts.left + (i + 0.5) * width);
    });
    const cross = byId("cross");
    cross.innerHTML = "";
    if (i !== null) {
      const y = 100 * (i + 0.5) / length, x = j === null ? null : 100 * (j + 0.5) / length;
      cross.innerHTML = `<line x1="0" x2="100" y1="${y}" y2="${y}"/>` + (x === null ? "" : `<line y1="0" y2="100" x1="${x}" x2="${x}"/>`);
    }
    spheres(residues);
    let text = "";
    if (i !== null) {
      text = residues.map((one) => `${called(one)}: pLDDT ${seed.plddt[one].toFixed(1)}`).join(" · ");
      if (data.counts) text += ` · ${data.counts[i].toLocaleString("en")} sequences`;
      if (j !== null) {
        const value = matrix.value(Math.floor(i / matrix.step), Math.floor(j / matrix.step));
        text += ` · ${data.matrix} ${numbered(i)} → ${numbered(j)}: ${value.toFixed(1)} Å`;
      }
    }
    byId("readout").textContent = text;
  }

  // --- what the user does ----------------------------------------------------------------------------------------------------------
  const inside = (value) => Math.max(0, Math.min(length - 1, Math.floor(value)));

  function choose(name) {
    const first = seed === null;
    seed = data.seeds.find((one) => one.seed === name);
    shape = wanted in seed.shapes ? wanted : Object.keys(seed.shapes)[0];
    press("shapes", shape);
    buttons("shapes").forEach((b) => { b.disabled = !(b.dataset.to in seed.shapes); });
    draw(seed, !first);
    matrix = readMatrix(seed);
    paint();
    document.querySelectorAll("#seeds button").forEach((b) => b.setAttribute("aria-pressed", String(Number(b.dataset.seed) === name)));
    document.querySelectorAll(".plddt, .of-seed").forEach((line) =>
      line.toggleAttribute("hidden", Number(line.dataset.seed) !== name || (line.dataset.shape || shape) !== shape));
    show(...chosen);
  }

  const square = byId("matrix");
  square.addEventListener("mousemove", (event) => {
    const box = square.getBoundingClientRect();
    highlight(inside((event.clientY - box.top) / box.height * length), inside((event.clientX - box.left) / box.width * length));
  });
  square.addEventListener("mouseleave", () => highlight(null, null));
  square.addEventListener("keydown", (event) => {
    const [down, right] = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key] || [0, 0];
    if (!down && !right) return;
    event.preventDefault();
    const far = event.shiftKey ? 10 : 1;
    highlight(inside((chosen[0] ?? 0) + far * down), inside((chosen[1] ?? chosen[0] ?? 0) + far * right));
  });
  document.querySelectorAll("svg.along").forEach((chart) => {
    chart.tabIndex = 0;
    chart.addEventListener("mousemove", (event) => {
      const box = chart.getBoundingClientRect(), { width, left, right } = data.charts;
      const x = (event.clientX - box.left) / box.width * width;
      highlight(inside((x - left) / (width - left - right) * length), null);
    });
    chart.addEventListener("mouseleave", () => highlight(null, null));
    chart.addEventListener("keydown", (event) => {
      const right = { ArrowLeft: -1, ArrowRight: 1 }[event.key];
      if (!right) return;
      event.preventDefault();
      highlight(inside((chosen[0] ?? -1) + right * (event.shiftKey ? 10 : 1)), null);
    });
  });
  document.querySelectorAll("#seeds button").forEach((b) => b.addEventListener("click", () => choose(Number(b.dataset.seed))));
  const buttons = (id) => document.querySelectorAll(`#${id} button`);
  const press = (id, to) => buttons(id).forEach((b) => b.setAttribute("aria-pressed", String(b.dataset.to === to)));
  buttons("colours").forEach((b) => b.addEventListener("click", () => {
    byChain = b.dataset.to === "chain";
    press("colours", b.dataset.to);
    draw(seed, true);
  }));
  buttons("shapes").forEach((b) => b.addEventListener("click", () => {
    wanted = b.dataset.to;
    choose(seed.seed);
  }));

  viewer = makeViewer();
  choose(data.seeds[0].seed);
  document.documentElement.dataset.ready = "yes";
})();

// What the user gives: a drawing, an image file, a row of a table, or one of the examples.

// A drawing on a large canvas. A pixel of the input is the mean of a square of `scale` pixels.
function makePad(setup, changed) {
  const [channels, height, width] = setup.shape, [low, high] = setup.levels, plane = height * width;
  const scale = Math.max(1, Math.round(280 / Math.max(height, width)));
  const canvas = byId("pad"), context = canvas.getContext("2d", { willReadFrequently: true });
  const history = [], cursor = byId("cursor"), cell = { x: width >> 1, y: height >> 1 };
  let exact = null; // the values of an example, which 8 bits would round
  let last = null;
  canvas.width = width * scale;
  canvas.height = height * scale;

  function fill() {
    context.fillStyle = "#000";
    context.fillRect(0, 0, canvas.width, canvas.height);
  }

  function remember() {
    history.push([context.getImageData(0, 0, canvas.width, canvas.height), exact]);
    if (history.length > 40) history.shift();
    byId("undo").disabled = false;
  }

  function values() {
    if (exact) return exact;
    const pixels = context.getImageData(0, 0, canvas.width, canvas.height).data;
    const found = new Array(channels * plane).fill(0);
    for (let y = 0; y < canvas.height; y++) {
      for (let x = 0; x < canvas.width; x++) {
        const from = 4 * (y * canvas.width + x), to = Math.floor(y / scale) * width + Math.floor(x / scale);
        if (channels === 3) for (let color = 0; color < 3; color++) found[color * plane + to] += pixels[from + color];
        else found[to] += 0.299 * pixels[from] + 0.587 * pixels[from + 1] + 0.114 * pixels[from + 2];
      }
    }
    return found.map((sum) => Math.min(high, Math.max(low, low + ((high - low) * sum) / (255 * scale * scale))));
  }

  function edit(change) {
    remember();
    exact = null;
    change();
    changed();
  }

  function show(given) {
    const small = make("canvas");
    remember();
    exact = given;
    drawPixels(small, given, setup);
    context.imageSmoothingEnabled = false;
    context.drawImage(small, 0, 0, canvas.width, canvas.height);
  }

  const place = (event) => {
    const box = canvas.getBoundingClientRect();
    return [((event.clientX - box.left) * canvas.width) / box.width, ((event.clientY - box.top) * canvas.height) / box.height];
  };
  const stroke = (from, to) => {
    context.strokeStyle = channels === 3 ? byId("ink").value : "#fff";
    context.lineWidth = 0.11 * Math.max(canvas.width, canvas.height);
    context.lineCap = context.lineJoin = "round";
    context.beginPath();
    context.moveTo(...from);
    context.lineTo(...to);
    context.stroke();
  };
  canvas.addEventListener("pointerdown", (event) => {
    if (event.button !== 0) return;
    canvas.setPointerCapture(event.pointerId);
    remember();
    exact = null;
    last = place(event);
    stroke(last, last);
  });
  canvas.addEventListener("pointermove", (event) => {
    if (last === null) return;
    const next = place(event);
    stroke(last, next);
    last = next;
  });
  for (const name of ["pointerup", "pointercancel"]) {
    canvas.addEventListener(name, () => {
      if (last !== null) changed();
      last = null;
    });
  }

  function showCursor() {
    for (const [side, start, count] of [["left", cell.x, width], ["top", cell.y, height]]) cursor.style[side] = `${(100 * start) / count}%`;
    cursor.style.width = `${100 / width}%`;
    cursor.style.height = `${100 / height}%`;
  }
  canvas.addEventListener("keydown", (event) => {
    const moves = { ArrowLeft: [-1, 0], ArrowRight: [1, 0], ArrowUp: [0, -1], ArrowDown: [0, 1] }[event.key];
    if (!moves && event.key !== " ") return;
    event.preventDefault();
    cursor.hidden = false;
    if (moves) {
      cell.x = Math.min(width - 1, Math.max(0, cell.x + moves[0]));
      cell.y = Math.min(height - 1, Math.max(0, cell.y + moves[1]));
      showCursor();
    } else {
      edit(() => {
        context.fillStyle = channels === 3 ? byId("ink").value : "#fff";
        context.fillRect(cell.x * scale, cell.y * scale, scale, scale);
      });
    }
  });
  canvas.addEventListener("blur", () => (cursor.hidden = true));

  byId("clear").addEventListener("click", () => edit(fill));
  byId("invert").addEventListener("click", () => edit(() => {
    context.globalCompositeOperation = "difference";
    context.fillStyle = "#fff";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.globalCompositeOperation = "source-over";
  }));
  byId("undo").addEventListener("click", () => {
    const before = history.pop();
    byId("undo").disabled = history.length === 0;
    if (!before) return;
    context.putImageData(before[0], 0, 0);
    exact = before[1];
    changed();
  });

  // The shorter side is resized to the frame, and the center is cropped, as for training images.
  async function open(file) {
    let image;
    try {
      image = await createImageBitmap(file);
    } catch {
      return complain(`image: expected a picture, got ${file.name || "something else"} (${file.type || "of no known type"})`);
    }
    const zoom = Math.max(canvas.width / image.width, canvas.height / image.height);
    const [wide, high] = [image.width * zoom, image.height * zoom];
    edit(() => {
      fill();
      context.imageSmoothingEnabled = true;
      context.imageSmoothingQuality = "high";
      context.drawImage(image, (canvas.width - wide) / 2, (canvas.height - high) / 2, wide, high);
    });
  }
  byId("file").addEventListener("change", (event) => {
    if (event.target.files.length) open(event.target.files[0]);
    event.target.value = "";
  });
  const frame = canvas.parentElement;
  for (const name of ["dragover", "dragleave", "drop"]) {
    frame.addEventListener(name, (event) => {
      event.preventDefault();
      frame.classList.toggle("over", name === "dragover");
      if (name === "drop" && event.dataTransfer.files.length) open(event.dataTransfer.files[0]);
    });
  }
  byId("ink-label").hidden = channels !== 3;
  byId("undo").disabled = true;
  byId("drawing").hidden = false;
  showCursor();
  fill();
  return { values, show };
}

// One field for each column: a number, or a choice between categories.
function makeEditor(setup, changed) {
  const MOST = 60, fields = byId("fields"), filter = byId("filter");
  let row = setup.start.slice();

  function control(field, id) {
    if (field.choice) {
      const select = make("select", { id });
      field.options.forEach((option, place) => select.append(new Option(option, place)));
      select.value = Math.max(0, field.choice.findIndex((column) => row[column] === 1));
      select.addEventListener("change", () => {
        field.choice.forEach((column, place) => (row[column] = Number(place === Number(select.value))));
        changed();
      });
      return select;
    }
    const input = make("input", { id, type: "number", step: "any", value: row[field.at] });
    input.addEventListener("change", () => {
      if (input.value === "") return complain(`${field.name}: expected a number, got nothing`);
      row[field.at] = Number(input.value);
      changed();
    });
    return input;
  }

  function draw() {
    const words = filter.value.toLowerCase();
    const matching = setup.fields.filter((field) => field.name.toLowerCase().includes(words));
    const shown = matching.slice(0, MOST).flatMap((field, place) => {
      const id = `field-${place}`;
      return [make("label", { for: id }, field.name), control(field, id)];
    });
    fields.replaceChildren(...shown);
    byId("more-fields").hidden = matching.length <= MOST;
    byId("more-fields").textContent = `${MOST} of ${matching.length} columns are shown.`;
  }
  for (const field of setup.fields) {
    if (field.choice && !field.choice.some((column) => row[column] === 1)) field.choice.forEach((column, place) => (row[column] = Number(place === 0)));
  }
  filter.hidden = setup.fields.length <= 24;
  filter.addEventListener("input", draw);
  byId("editing").hidden = false;
  draw();
  return { values: () => row, show: (given) => { row = given.slice(); draw(); } };
}

function listExamples(setup, choose) {
  const list = byId("examples");
  byId("examples-title").textContent = setup.held_out ? "Examples that are not in the bank" : "Training points to start from";
  byId("examples-title").hidden = setup.examples.length === 0;
  list.classList.toggle("wide", setup.kind === "row");
  list.replaceChildren(...setup.examples.map(({ input, truth }, place) => {
    const name = truth === null ? `example ${place + 1}` : nameOf(setup, truth);
    const button = make("button", { type: "button", "aria-pressed": "false" }, setup.kind === "row" ? `${place + 1}: ${name}` : name);
    if (setup.kind === "image") {
      const picture = make("canvas", { "aria-hidden": "true" });
      drawPixels(picture, input, setup);
      button.prepend(picture);
    }
    button.setAttribute("aria-label", truth === null ? name : `example ${place + 1}, labeled ${name}`);
    button.addEventListener("click", () => choose(place));
    return make("li", {}, button);
  }));
}

function pressExample(place) {
  document.querySelectorAll("#examples button").forEach((button, own) => button.setAttribute("aria-pressed", String(own === place)));
}

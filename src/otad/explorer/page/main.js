// The page itself. With a server, an input is sent once and comes back with its whole path; without
// one, the examples and their paths are in the page. Moving the slider asks nobody.

const stored = JSON.parse(byId("data").textContent);
const state = { setup: null, given: null, found: null, step: 0, first: 0, timer: null, waiting: null, asking: null, token: "" };

function complain(text) {
  byId("error").textContent = text;
  byId("error").hidden = false;
}

async function ask(options) {
  const headers = state.token ? { Authorization: `Bearer ${state.token}` } : {};
  const reply = await fetch("explore", { ...options, headers: { ...headers, ...(options.headers || {}) } });
  const body = await reply.json().catch(() => ({}));
  if (reply.ok) return body;
  const reason = typeof body.error === "string" ? body.error : `the server answered with status ${reply.status}`;
  throw Object.assign(new Error(reason), { status: reply.status });
}

// Answers that come late, after another input was given, are dropped.
async function explore() {
  if (state.asking) state.asking.abort();
  const asking = (state.asking = new AbortController());
  byId("explorer").setAttribute("aria-busy", "true");
  try {
    const found = await ask({ method: "POST", signal: asking.signal, headers: { "Content-Type": "application/json" }, body: JSON.stringify({ input: state.given.values() }) });
    if (asking === state.asking) present(found);
  } catch (error) {
    if (asking !== state.asking) return;
    complain(error.status ? error.message : "The server cannot be reached. Is it still running?");
  }
  if (asking === state.asking) byId("explorer").setAttribute("aria-busy", "false");
}

function changed() {
  pressExample(null);
  clearTimeout(state.waiting);
  state.waiting = setTimeout(explore, 350);
}

function choose(place) {
  pressExample(place);
  if (state.given) state.given.show(state.setup.examples[place].input);
  if (!stored) return explore();
  present(stored.explored[place]);
}

function present(found) {
  pause();
  byId("error").hidden = true;
  state.found = found;
  byId("slider").max = found.distance.length - 1;
  for (const id of ["slider", "play"]) byId(id).disabled = found.distance.length < 2;
  byId("path").hidden = byId("play").disabled;
  drawTracks(state.setup, found);
  describe(found);
  byId("slider").value = state.first;
  state.first = 0;
  show(Number(byId("slider").value), null);
  byId("explorer").setAttribute("aria-busy", "false");
}

const unit = () => (state.setup.unit ? ` ${state.setup.unit}` : "");

function describe(found) {
  const { radius, everywhere, refusal, low, high, eps } = found.certificate, flip = found.answer_flip;
  const isValue = !state.setup.classes, tile = byId("flip-tile");
  byId("radius").nextElementSibling.textContent = isValue ? "proved range" : "certified radius";
  if (refusal) {
    byId("radius").textContent = "none";
    byId("radius-note").textContent = `Nothing is proved: ${refusal}`;
  } else if (isValue) {
    byId("radius").textContent = low === null || high === null ? "none" : `${number(low)} to ${number(high)}`;
    byId("radius-note").textContent = `for every input within ${measure(eps)}${unit()}`;
  } else {
    byId("radius").textContent = everywhere ? "infinite" : measure(radius);
    byId("radius-note").textContent = radius || everywhere ? `no smaller change gives another answer${state.setup.unit ? `, in${unit()}` : ""}` : "nothing is proved here";
  }
  byId("far-note").textContent = `here to the nearest training point, between ${found.space}`;
  tile.classList.toggle("found", flip !== null);
  byId("flip-name").textContent = isValue ? "at the end of the path" : "first other answer";
  if (isValue) {
    byId("flip").textContent = number(found.answer.at(-1), 4);
    byId("flip-note").textContent = `at distance ${measure(found.distance.at(-1))}${unit()}`;
  } else {
    byId("flip").textContent = flip === null ? "none" : measure(found.distance[flip]);
    byId("flip-note").textContent = found.distance.length < 2 ? "there is no answer to attack" : flip === null ? `up to ${measure(found.distance.at(-1))}${unit()}` : `the answer becomes ${nameOf(state.setup, found.answer[flip])}`;
  }
}

function show(step, before) {
  const { setup, found } = state, flip = found.answer_flip;
  state.step = step;
  drawMoved(setup, found, step);
  drawMap(setup, found, step);
  drawDial(setup, found, step);
  drawBars(setup, found, step);
  drawPoints(setup, found, step, before);
  const sides = [["answer", "sure", found.answer, found.probabilities], ["bare-answer", "bare-sure", found.undefended, found.undefended_probabilities]];
  for (const [id, sure, answers, shares] of sides) {
    const answer = answers[step], node = byId(id), place = found.shown ? found.shown.indexOf(answer) : -1;
    node.replaceChildren(swatch(colorOf(setup, answer)), nameOf(setup, answer));
    node.parentElement.classList.toggle("changed", Boolean(setup.classes) && answer !== answers[0]);
    byId(sure).textContent = answer === null ? "too far from the training points" : place >= 0 ? `probability ${percent(shares[step][place])}` : "";
  }
  byId("far").textContent = measure(found.from_bank[step]);
  byId("account").textContent = `${found.account[step].replace(/^./, (first) => first.toUpperCase())}.`;
  const count = found.weighted[step], listed = found.neighbors[step].length;
  byId("points-note").textContent = count === null ? "The answer has no weights: a network estimates it." : `${count} training points have weight${count > listed ? `; the ${listed} heaviest are shown` : ""}.${found.answer[step] === null ? "" : ` Contributions sum to the ${setup.classes ? "margin over the runner-up" : "value"}.`}`;
  const proved = step < provedSteps(found), far = `${measure(found.distance[step])}${unit()}`;
  const place = step === 0 ? "This is the input itself." : `The input has moved by ${far}.`;
  const verdict = found.answer[step] === null ? " Here the model gives no answer." : proved ? " Here the answer is proved." : flip !== null && step >= flip && found.answer[step] !== found.answer[0] ? " The attack has changed the answer." : " Here the answer still holds, but without proof.";
  byId("story").textContent = setup.classes ? place + verdict : place;
  byId("slider").setAttribute("aria-valuetext", `distance ${far}, answer ${nameOf(setup, found.answer[step])}${proved ? ", proved" : ""}`);
  clearTimeout(state.saying);
  state.saying = setTimeout(() => (byId("live").textContent = `Defended: ${nameOf(setup, found.answer[step])}. Undefended: ${nameOf(setup, found.undefended[step])}. ${byId("story").textContent}`), 600);
}

function pause() {
  clearInterval(state.timer);
  state.timer = null;
  byId("play").textContent = "Play";
}

function play() {
  if (state.timer !== null) return pause();
  const slider = byId("slider"), last = Number(slider.max);
  if (Number(slider.value) === last) slider.value = 0;
  byId("play").textContent = "Pause";
  state.timer = setInterval(() => {
    slider.value = Number(slider.value) + 1;
    show(Number(slider.value), state.step);
    if (Number(slider.value) === last) pause();
  }, 70);
}

function begin(setup) {
  state.setup = setup;
  document.title = `otad explorer: ${setup.name}`;
  byId("name").textContent = setup.name;
  if (!stored) state.given = (setup.kind === "image" ? makePad : makeEditor)(setup, changed);
  byId("notice").hidden = !stored;
  if (stored) byId("command").textContent = stored.command;
  listExamples(setup, choose);
  const { share, dim, points } = setup.map;
  const [low, high] = valueRange(setup);
  const marks = setup.classes ? setup.classes.map((name, label) => [name, label]).slice(0, 20) : [[`low: ${number(low)}`, low], [`high: ${number(high)}`, high]];
  byId("legend").replaceChildren(...marks.map(([name, label]) => make("li", {}, swatch(colorOf(setup, label)), name)));
  byId("map-note").textContent = `${points.length} of ${setup.bank} training points, in the two directions of ${dim} that show ${percent(share)} of their variance. The dashed line is the path of the attack${setup.classes ? ", green where the answer is proved. A ring around the input is its certified radius" : ""}.`;
  byId("footer").textContent = stored ? "Written by otad. Nothing on this page is loaded from elsewhere." : "Served by otad. Inputs are sent to this server only.";
  drawMap(setup, null, 0);
  // The address may name an example and a step of its path, such as #2,40.
  const [example, step] = location.hash.slice(1).split(",").map(Number);
  state.first = step || 0;
  if (setup.examples.length) choose(setup.examples[example] ? example : 0);
  else explore();
}

async function open() {
  try {
    begin(stored ? stored.setup : await ask({}));
    byId("login").hidden = true;
  } catch (error) {
    if (error.status === 401) byId("login").hidden = false;
    if (error.status !== 401 || state.token) complain(error.status ? error.message : "The server cannot be reached. Is it still running?");
  }
}

byId("slider").addEventListener("input", (event) => {
  pause();
  show(Number(event.target.value), state.step);
});
byId("play").addEventListener("click", play);
byId("login").addEventListener("submit", (event) => {
  event.preventDefault();
  state.token = byId("token").value;
  open();
});
byId("theme").addEventListener("click", () => {
  const dark = isDark();
  document.documentElement.dataset.theme = dark ? "light" : "dark";
  nameTheme();
});
const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const nameTheme = () => (byId("theme").textContent = isDark() ? "Light" : "Dark");
nameTheme();
open();

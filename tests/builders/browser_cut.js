// Leaves what a window of the frames' width cuts as the page's only text (browser.py).
setTimeout(() => {
  const found = [];
  const inBox = (one, style) => one && (["auto", "scroll"].includes(style(one).overflowX) || inBox(one.parentElement, style));
  for (const frame of document.querySelectorAll("iframe")) {
    const inside = frame.contentDocument, { innerWidth: width } = frame.contentWindow;
    const style = (one) => frame.contentWindow.getComputedStyle(one);
    const say = (what) => found.push(`${frame.name}: ${what}`);
    if (!inside.querySelector("h1")) say("empty");
    for (const one of inside.querySelectorAll("body *")) {
      const box = one.getBoundingClientRect();
      if (!box.width || (box.right <= width + 1 && box.left >= -1) || inBox(one.parentElement, style)) continue;
      say(`${one.tagName} ${one.textContent.slice(0, 40)} leaves the window`);
    }
    for (const picture of inside.querySelectorAll("svg")) {
      const edge = picture.getBoundingClientRect();
      const texts = [...picture.querySelectorAll("text")].map((text) => [text.textContent, text.getBoundingClientRect()]);
      texts.forEach(([text, box], place) => {
        if (box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 1 || box.bottom > edge.bottom + 1) {
          say(`"${text}" leaves its picture`);
        }
        for (const [other, there] of texts.slice(place + 1)) {
          const across = Math.min(box.right, there.right) - Math.max(box.left, there.left);
          const down = Math.min(box.bottom, there.bottom) - Math.max(box.top, there.top);
          if (across > 1 && down > 4) say(`"${text}" covers "${other}"`); // lines of text are higher than letters
        }
      });
    }
  }
  document.body.textContent = "ANSWER" + JSON.stringify(found) + "END";
}, 3000);

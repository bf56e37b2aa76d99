// Pages opened from the disk may start no worker, so the search runs in a frame. (mkdocs-material's offline plugin would load
// a script for this from a server; it leaves that out because this file's name contains "iframe-worker".)
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe"), script = document.createElement("script");
      frame.hidden = true;
      document.body.append(frame);
      this.inside = frame.contentWindow;
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      script.src = url;
      this.ready = new Promise((loaded) => script.addEventListener("load", loaded));
      this.inside.document.body.append(script);
    }
    postMessage(data) {
      this.ready.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })));
    }
    terminate() {}
  };
}

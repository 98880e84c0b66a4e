// Search runs in a worker, which browsers do not start for a page that was opened from a folder. Here a hidden frame
// takes its place: the worker's script runs in it, and messages go to and fro as events.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(url) {
      super();
      const frame = document.createElement("iframe");
      frame.hidden = true;
      frame.title = "search";
      document.body.append(frame);
      this.scope = frame.contentWindow;
      const load = (address) =>
        new Promise((loaded, failed) => {
          const script = this.scope.document.createElement("script");
          Object.assign(script, { src: address, onload: loaded, onerror: failed });
          this.scope.document.head.append(script);
        });
      this.scope.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }));
      this.scope.importScripts = (...addresses) =>
        addresses.reduce((before, address) => before.then(() => load(address)), Promise.resolve());
      this.ready = load(url);
    }

    postMessage(data) {
      this.ready.then(() => this.scope.dispatchEvent(new MessageEvent("message", { data })));
    }
  };
}

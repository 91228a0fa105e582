// The search runs in a worker. A page that was opened from a disk may start none, so there it runs in a frame.
if (location.protocol === "file:") {
  window.Worker = class {
    #frame = document.createElement("iframe");
    #inside;

    constructor(address) {
      this.#frame.hidden = true;
      this.#frame.title = "search";
      this.#frame.srcdoc = "<!doctype html>";
      this.#inside = new Promise((resolve) => {
        this.#frame.onload = () => {
          const inside = this.#frame.contentWindow;
          const script = inside.document.createElement("script");
          inside.postMessage = (data) => this.onmessage?.({ data });
          script.onload = () => resolve(inside);
          script.onerror = () => this.onerror?.(new Error(`${address} cannot be loaded`));
          script.src = address;
          inside.document.body.append(script);
        };
      });
      document.body.append(this.#frame);
    }

    postMessage(data) {
      this.#inside.then((inside) => inside.onmessage({ data }));
    }

    terminate() {
      this.#frame.remove();
    }
  };
}

// Browsers start no worker for a page that was opened from disk. There the search of the theme runs in a hidden frame
// instead, which has the same origin as the page, and is spoken to as a worker is.
if (location.protocol === "file:") {
  window.Worker = class extends EventTarget {
    constructor(address) {
      super()
      const frame = document.createElement("iframe")
      frame.hidden = true
      document.body.append(frame)
      const inside = frame.contentDocument
      inside.open() // Firefox would replace a document that was not written
      inside.write("<!doctype html><title>search</title><body>")
      inside.close()
      this.inside = frame.contentWindow
      this.inside.postMessage = (data) => this.dispatchEvent(new MessageEvent("message", { data }))
      const script = inside.createElement("script")
      script.src = new URL(address, location)
      this.loaded = new Promise((done) => script.addEventListener("load", done))
      inside.body.append(script)
    }

    postMessage(data) {
      this.loaded.then(() => this.inside.dispatchEvent(new MessageEvent("message", { data })))
    }
  }
}

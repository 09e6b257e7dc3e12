// The connection: polling the state, keys, commands. Knows nothing of the page.

const QUICK_MS = 250, USUAL_MS = 1000, TIMEOUT_MS = 8000;
const BACKOFF_MS = [1000, 2000, 4000, 8000];

// An answer of the server that is a refusal, with rota's code; or "unreachable".
export class Refused extends Error {
  constructor(status, error) {
    super(error.message.replace(/^[A-Z]*\[[^\]]*\] /, "")); // the code is shown beside it
    this.status = status;
    this.code = error.code;
    this.retryAfter = error.rota?.retry_after_s ?? null;
  }
}

export class Link {
  #key = "";
  #timer = 0;
  #failures = 0;
  #since = -1;
  #busy = 0;
  #polling = false;
  #again = false;

  // on: {state(data), lost(error, seconds), unauthorized(), askKey(why) -> Promise<string|null>}
  constructor(on) {
    this.on = on;
    document.addEventListener("visibilitychange", () => document.hidden || this.now());
    addEventListener("online", () => this.now());
  }

  get hasKey() {
    return this.#key !== "";
  }

  setKey(key) {
    this.#key = key;
    this.now();
  }

  // Poll at once, whatever was planned; one poll at a time.
  now() {
    clearTimeout(this.#timer);
    if (this.#polling) this.#again = true;
    else this.#timer = setTimeout(() => this.#poll(), 0);
  }

  async #fetch(path, options = {}) {
    const headers = { ...options.headers };
    if (this.#key) headers.Authorization = `Bearer ${this.#key}`;
    let answer;
    try {
      answer = await fetch(path, { ...options, headers, credentials: "omit", cache: "no-store" });
    } catch (error) {
      const why = error.name === "TimeoutError" ? "does not answer in time" : "cannot be reached";
      throw new Refused(0, { code: "unreachable", message: `the server ${why}` });
    }
    const body = await answer.json().catch(() => null);
    if (!answer.ok) {
      const plain = { code: `http-${answer.status}`, message: answer.statusText || "no answer" };
      throw new Refused(answer.status, body?.error ?? plain);
    }
    return body;
  }

  async #poll() {
    this.#polling = true;
    const wait = await this.#look();
    this.#polling = false;
    clearTimeout(this.#timer);
    const again = this.#again;
    this.#again = false;
    if (again) this.now();
    else if (wait != null && !document.hidden) this.#timer = setTimeout(() => this.#poll(), wait);
  }

  // One poll; answers how long to wait for the next, null: until there is another key.
  async #look() {
    try {
      const signal = AbortSignal.timeout(TIMEOUT_MS);
      const data = await this.#fetch(`ui/state?since=${this.#since}`, { signal });
      this.#failures = 0;
      const { first, bins } = data.pulse;
      this.#since = first + bins.length - 1;
      this.on.state(data);
      return this.#busy || data.adapters.some((a) => a.doing) ? QUICK_MS : USUAL_MS;
    } catch (error) {
      if (!(error instanceof Refused)) throw error;
      if (error.status === 401) {
        this.on.unauthorized(this.hasKey);
        return null;
      }
      const wait = BACKOFF_MS[Math.min(this.#failures++, BACKOFF_MS.length - 1)];
      this.on.lost(error, wait / 1000);
      return wait;
    }
  }

  // A request that needs an admin key; asks for one, and again when it is wrong. Null: given up.
  async admin(path, body) {
    let why = "Adapter commands need an admin key.";
    let key = this.#key;
    for (;;) {
      if (!key) key = await this.on.askKey(why);
      if (!key) return null;
      const before = this.#key;
      this.#key = key;
      this.#busy++;
      this.now();
      try {
        const options = body && {
          method: "POST",
          headers: { "Content-Type": "application/json" },
          body: JSON.stringify(body),
        };
        return await this.#fetch(path, options || {});
      } catch (error) {
        if (error.status !== 401) throw error;
        this.#key = before; // perhaps good for looking
        key = "";
        why = "That key is not an admin key of this server.";
      } finally {
        this.#busy--;
        this.now();
      }
    }
  }
}

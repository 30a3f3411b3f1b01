// Drives an MCP server through scenarios with the TypeScript SDK's client, and reports each as one line of JSON.
//
//   node driver.mjs --url http://127.0.0.1:8080/mcp [--sdk 1|2] [--rounds N] basics counter ...
//
// The SDK has two major versions, in packages of different names; --sdk says which one, 1 by default. Version 2 speaks the
// handshake era here, as it does unless told otherwise; the scenario modern tells it.
//
// A line has the scenario's name, ok, what it found out, and how many requests each back-end served. The scenarios
// check what a client can see by themselves; what only the test knows (how many back-ends there are, whether the lock
// is on) the test checks in the lines. The exit code is 1 if a scenario failed, 2 for bad arguments.
//
// Every scenario looks at the raw HTTP exchange as well, because the SDK takes an answer from wherever it comes:
// an answer must stand in the response to the POST that carried its request, and nowhere else (F2).

import assert from 'node:assert/strict';
import { createInterface } from 'node:readline';
import { parseArgs } from 'node:util';

/** What differs between the major versions of the SDK. */
const SDKS = {
  async 1() {
    const { Client } = await import('@modelcontextprotocol/sdk/client/index.js');
    const { StreamableHTTPClientTransport } = await import('@modelcontextprotocol/sdk/client/streamableHttp.js');
    const types = await import('@modelcontextprotocol/sdk/types.js');
    const schemas = {
      'elicitation/create': types.ElicitRequestSchema,
      'sampling/createMessage': types.CreateMessageRequestSchema,
      'roots/list': types.ListRootsRequestSchema,
      'notifications/message': types.LoggingMessageNotificationSchema,
      'notifications/resources/updated': types.ResourceUpdatedNotificationSchema,
      'notifications/tools/list_changed': types.ToolListChangedNotificationSchema,
    };
    return {
      Client,
      StreamableHTTPClientTransport,
      onRequest: (client, method, handler) => client.setRequestHandler(schemas[method], handler),
      onNotification: (client, method, handler) => client.setNotificationHandler(schemas[method], handler),
      callTool: (client, params, options) => client.callTool(params, undefined, options),
    };
  },
  async 2() {
    const { Client, StreamableHTTPClientTransport } = await import('@modelcontextprotocol/client');
    return {
      Client,
      StreamableHTTPClientTransport,
      onRequest: (client, method, handler) => client.setRequestHandler(method, handler),
      onNotification: (client, method, handler) => client.setNotificationHandler(method, handler),
      callTool: (client, params, options) => client.callTool(params, options),
    };
  },
};

/** The one in use. */
let sdk;

const TOOLS = ['echo', 'counter_add', 'note_set', 'notes_list', 'ask', 'sample', 'roots', 'slow', 'say', 'fail', 'panic'];

/** One HTTP exchange, as it was seen on the wire. */
class Exchange {
  /** @param {string} method @param {any} message @param {Headers} headers */
  constructor(method, message, headers) {
    this.method = method;
    this.message = message;
    this.resumes = headers.has('last-event-id');
    this.status = 0;
    this.servedBy = '';
    this.contentType = '';
    this.body = '';
    this.ended = false;
    this.cancelled = false;
    /** Set to break the response off once so much of its body is there. @type {(body: string) => boolean} */
    this.cutWhen = () => false;
  }
  get isCall() {
    return this.message?.id !== undefined && this.message?.method !== undefined;
  }
  get isAnswer() {
    return this.message?.id !== undefined && this.message?.method === undefined;
  }

  /** What is wrong with the answers in this response, if anything. */
  fault() {
    if (this.status < 200 || this.status > 299 || this.resumes) {
      return undefined;
    }
    const expected = this.isCall ? [this.message.id] : [];
    const got = messages(this.contentType, this.body, this.ended)
      .filter((m) => m.method === undefined)
      .map((m) => m.id);
    const what = `${this.method} ${JSON.stringify(this.message)?.slice(0, 200) ?? ''}`;
    if (got.length > expected.length || got.some((id) => !expected.includes(id))) {
      return `${what} brought the answers ${JSON.stringify(got)}`;
    }
    if (this.ended && got.length < expected.length && !this.cancelled) {
      return `${what} ended without its answer: ${this.body.slice(0, 500)}`;
    }
    return undefined;
  }
}

/** Records all exchanges of a client. */
class Wire {
  constructor() {
    /** @type {Exchange[]} */
    this.exchanges = [];
    /** Which calls to break off, and when. @type {(x: Exchange) => ((body: string) => boolean) | undefined} */
    this.cut = () => undefined;
    this.fetch = async (url, init = {}) => {
      const x = new Exchange(init.method ?? 'GET', init.body ? JSON.parse(init.body) : undefined, new Headers(init.headers));
      this.exchanges.push(x);
      x.cutWhen = this.cut(x) ?? x.cutWhen;
      if (x.message?.method === 'notifications/cancelled') {
        for (const y of this.exchanges) {
          y.cancelled ||= y.isCall && y.message.id === x.message.params.requestId;
        }
      }
      const response = await fetch(url, init);
      x.status = response.status;
      x.servedBy = response.headers.get('x-served-by') ?? '';
      x.contentType = response.headers.get('content-type') ?? '';
      return response.body ? new Response(record(x, response.body), response) : response;
    };
  }

  /** @returns {Record<string, number>} */
  served() {
    const out = {};
    for (const { servedBy } of this.exchanges) {
      if (servedBy) {
        out[servedBy] = (out[servedBy] ?? 0) + 1;
      }
    }
    return out;
  }
}

/** Passes a body on and keeps what came in the exchange. (A clone of the response can wait for ever once either is cut.) */
function record(x, body) {
  const reader = body.getReader();
  const decoder = new TextDecoder();
  return new ReadableStream({
    async pull(controller) {
      const { done, value } = await reader.read();
      x.body += decoder.decode(value, { stream: !done });
      if (done) {
        x.ended = true;
        controller.close();
        return;
      }
      controller.enqueue(value);
      if (x.cutWhen(x.body)) {
        controller.error(new TypeError('cut by the test'));
        await reader.cancel();
      }
    },
    cancel: (reason) => reader.cancel(reason),
  });
}

/** The JSON-RPC messages in a response body. */
function messages(contentType, text, ended) {
  if (contentType.startsWith('application/json')) {
    return ended && text !== '' ? [JSON.parse(text)].flat() : [];
  }
  if (!contentType.startsWith('text/event-stream')) {
    return [];
  }
  return text
    .replaceAll('\r\n', '\n')
    .split('\n\n')
    .map((event) =>
      event
        .split('\n')
        .filter((line) => line.startsWith('data:'))
        .map((line) => line.slice('data:'.length).trimStart())
        .join('\n'),
    )
    .filter((data) => data !== '')
    .flatMap((data) => {
      try {
        return [JSON.parse(data)];
      } catch {
        assert.ok(!ended, `not JSON in an event: ${data}`);
        return []; // cut off in the middle
      }
    });
}

/** A connected client together with its wire. */
class Session {
  /** @param {URL} url @param {{capabilities?: object, more?: object}} options */
  static async open(url, { capabilities = { elicitation: {}, sampling: {}, roots: {} }, more = {} } = {}) {
    const s = new Session();
    s.url = url;
    s.wire = new Wire();
    /** @type {Error[]} */
    s.errors = [];
    s.client = new sdk.Client({ name: 'sessiond-e2e', version: '1.0.0' }, { capabilities, ...more });
    s.client.onerror = (e) => s.errors.push(e);
    s.transport = new sdk.StreamableHTTPClientTransport(url, { fetch: s.wire.fetch });
    await s.client.connect(s.transport);
    return s;
  }

  /** Answers the server's requests of a method. */
  onRequest(method, handler) {
    sdk.onRequest(this.client, method, handler);
  }

  /** Hears the server's notifications of a method. */
  onNotification(method, handler) {
    sdk.onNotification(this.client, method, handler);
  }

  /** Waits until the standalone stream is open, which the SDK sees to by itself. */
  async listening() {
    await until(() => this.wire.exchanges.some((x) => x.method === 'GET' && x.status === 200), 'a standalone stream');
  }

  /** Calls a tool and gives the text of its result. */
  async call(name, args = {}, options = undefined) {
    const result = await sdk.callTool(this.client, { name, arguments: args }, options);
    assert.notEqual(result.isError, true, `${name}: ${result.content?.[0]?.text}`);
    assert.equal(result.content.length, 1, `${name}: one content`);
    assert.equal(result.content[0].type, 'text');
    return result.content[0].text;
  }

  /** Closes the client, and throws if anything on the wire was wrong. */
  async close() {
    await this.client.close();
    assert.deepEqual(this.wire.exchanges.map((x) => x.fault()).filter((f) => f), []);
  }
}

/** @type {Record<string, (url: URL, rounds: number) => Promise<object>>} */
const scenarios = {
  // The handshake, lists and a call, all of it on different back-ends.
  async basics(url) {
    const s = await Session.open(url);
    const names = (await s.client.listTools()).tools.map((t) => t.name);
    for (const tool of TOOLS) {
      assert.ok(names.includes(tool), `tools/list has no ${tool}: ${names}`);
    }
    const { resources } = await s.client.listResources();
    assert.ok(resources.length > 0, 'resources/list is empty');
    for (const { uri } of resources) {
      const { contents } = await s.client.readResource({ uri });
      assert.ok(contents.length > 0, `resources/read ${uri} is empty`);
    }
    for (const text of ['hello', '', 'Zwölf Boxkämpfer 🥊\n\r\n\t"quoted" \\ data: x\n\nevent: y', 'x'.repeat(200_000)]) {
      assert.equal(await s.call('echo', { text }), text);
    }
    await s.client.ping();
    const sessionId = s.transport.sessionId;
    assert.match(sessionId ?? '', /^[\x21-\x7e]{1,128}$/, 'session id');
    await s.close();
    return { sessionId, server: s.client.getServerVersion(), protocol: s.transport.protocolVersion, served: s.wire.served() };
  },

  // A session's value adds up over calls that every back-end takes part in, and is that session's own.
  async counter(url) {
    const [s, other] = [await Session.open(url), await Session.open(url)];
    let total = 0;
    for (let i = 1; i <= 100; i++) {
      total += i;
      assert.equal(await s.call('counter_add', { by: i }), String(total), `call ${i}`);
      if (i % 25 === 0) {
        assert.equal(await other.call('counter_add', { by: 1 }), String(i / 25), 'the other session');
      }
    }
    await s.close();
    await other.close();
    return { total, served: s.wire.served() };
  },

  // Three questions in one call, each answered by a POST of its own on whichever back-end is next.
  async ask(url) {
    const s = await Session.open(url);
    const questions = [];
    s.onRequest('elicitation/create', ({ params }) => {
      assert.deepEqual(Object.keys(params.requestedSchema.properties), ['answer']);
      questions.push(params.message);
      return { action: 'accept', content: { answer: `answer ${questions.length}` } };
    });
    const rounds = 5;
    const hops = [];
    for (let round = 1; round <= rounds; round++) {
      questions.length = 0;
      const before = s.wire.exchanges.length;
      const text = await s.call('ask', { questions: 3 });
      assert.deepEqual(JSON.parse(text), ['answer 1', 'answer 2', 'answer 3']);
      assert.equal(questions.length, 3);
      const exchanges = s.wire.exchanges.slice(before);
      const asker = exchanges.find((x) => x.isCall);
      const answers = exchanges.filter((x) => x.isAnswer);
      assert.equal(answers.length, 3, 'POSTs with an answer');
      hops.push([asker, ...answers]);
    }
    // A result may overtake the response to the last answer.
    await until(() => s.wire.exchanges.every((x) => !x.isAnswer || x.status === 202), 'every answer is accepted (202)');
    await s.close();
    return { hops: hops.map((round) => round.map((x) => x.servedBy)), served: s.wire.served() };
  },

  // While a handler waits for its answer other requests of the session run, and what they change stays (F8).
  async 'ask-while-busy'(url) {
    const s = await Session.open(url);
    let asked = 0;
    s.onRequest('elicitation/create', async () => {
      asked++;
      assert.equal(await s.call('counter_add', { by: 1 }), String(asked));
      await s.call('note_set', { key: `asked ${asked}`, value: 'yes' });
      await s.client.listTools();
      return { action: 'accept', content: { answer: String(asked) } };
    });
    assert.deepEqual(JSON.parse(await s.call('ask', { questions: 3 })), ['1', '2', '3']);
    assert.equal(await s.call('counter_add', { by: 0 }), '3');
    assert.deepEqual(JSON.parse(await s.call('notes_list')), { 'asked 1': 'yes', 'asked 2': 'yes', 'asked 3': 'yes' });
    await s.close();
    return { asked, served: s.wire.served() };
  },

  // Several calls of one session wait for answers at the same time; each gets its own.
  async 'ask-in-parallel'(url) {
    const s = await Session.open(url);
    let asked = 0;
    s.onRequest('elicitation/create', async () => {
      const answer = `answer ${++asked}`;
      await Promise.resolve();
      return { action: 'accept', content: { answer } };
    });
    const calls = await Promise.all(Array.from({ length: 10 }, () => s.call('ask', { questions: 2 })));
    const answers = calls.flatMap((text) => JSON.parse(text));
    assert.equal(answers.length, 20);
    assert.equal(new Set(answers).size, 20, `answers got mixed up: ${answers}`);
    await s.close();
    return { asked, served: s.wire.served() };
  },

  // A client that cannot be asked: the tool's call fails at once, with a reason, and nothing else does (F9).
  async 'cannot-be-asked'(url) {
    const s = await Session.open(url, { capabilities: {} });
    const begin = Date.now();
    const errors = [];
    for (const [name, args] of [['ask', { questions: 1 }], ['sample', { prompt: 'x' }], ['roots', {}]]) {
      const result = await s.client.callTool({ name, arguments: args });
      assert.equal(result.isError, true, `${name} did not fail`);
      errors.push(result.content[0].text);
    }
    const ms = Date.now() - begin;
    assert.ok(ms < 5_000, `it took ${ms} ms to fail`);
    assert.equal(await s.call('echo', { text: 'still here' }), 'still here');
    await s.close();
    return { errors, served: s.wire.served() };
  },

  async sampling(url) {
    const s = await Session.open(url);
    s.onRequest('sampling/createMessage', ({ params }) => ({
      model: 'e2e',
      role: 'assistant',
      content: { type: 'text', text: `sampled: ${params.messages[0].content.text}` },
    }));
    for (let i = 0; i < 5; i++) {
      assert.equal(await s.call('sample', { prompt: `prompt ${i}` }), `sampled: prompt ${i}`);
    }
    await s.close();
    return { served: s.wire.served() };
  },

  async roots(url) {
    const s = await Session.open(url);
    s.onRequest('roots/list', () => ({ roots: [{ uri: 'file:///e2e/root', name: 'e2e' }] }));
    for (let i = 0; i < 5; i++) {
      assert.match(await s.call('roots'), /file:\/\/\/e2e\/root/);
    }
    await s.close();
    return { served: s.wire.served() };
  },

  // Progress comes on the request's own stream, in order, before the result (F19).
  async progress(url) {
    const s = await Session.open(url);
    const seen = [];
    await s.call('slow', { seconds: 2 }, { onprogress: (p) => seen.push(p.progress) });
    assert.deepEqual(seen, [1, 2], 'progress before the result');
    await s.close();
    return { progress: seen, served: s.wire.served() };
  },

  // A level set on one back-end holds on all (F12), and the messages come in order.
  async logging(url) {
    const s = await Session.open(url);
    const seen = [];
    s.onNotification('notifications/message', ({ params }) => {
      seen.push(params);
    });
    const say = async (count) => {
      seen.length = 0;
      await s.call('say', { count, interval_ms: 10 });
      return seen.map((p) => JSON.stringify(p.data));
    };
    for (let i = 0; i < 4; i++) {
      await s.client.setLoggingLevel('debug');
      const all = await say(5);
      assert.equal(all.length, 5, `messages at level debug: ${all}`);
      assert.equal(new Set(all).size, 5, `the same message twice: ${all}`);
      await s.client.setLoggingLevel('emergency');
      assert.deepEqual(await say(5), [], 'messages at level emergency');
    }
    await s.close();
    return { served: s.wire.served() };
  },

  // A resource that is updated on any replica is told on the standalone stream of who is subscribed to it, once, and not
  // after that has unsubscribed (F12). Needs a server that runs with --everything, as all up to modern do.
  async subscribe(url) {
    const s = await Session.open(url);
    const uri = 'test://watched-resource';
    const updated = [];
    let changes = 0;
    s.onNotification('notifications/resources/updated', ({ params }) => {
      updated.push(params.uri);
    });
    s.onNotification('notifications/tools/list_changed', () => {
      changes++;
    });
    await s.listening();
    await s.client.subscribeResource({ uri });
    const before = s.wire.exchanges.length;
    for (let i = 0; i < 3; i++) {
      await s.call('test_update_resource', { uri });
    }
    const raisedOn = new Set(s.wire.exchanges.slice(before).map((x) => x.servedBy));
    await until(() => updated.length >= 3, `3 updates, ${updated.length} were told`);
    await s.client.unsubscribeResource({ uri });
    await s.call('test_update_resource', { uri });
    changes = 0; // a list may have changed before
    await s.call('test_trigger_tool_change');
    await until(() => changes > 0, 'told of a change after the update');
    assert.deepEqual(updated, [uri, uri, uri]);
    await s.close();
    return { raisedOn: [...raisedOn], served: s.wire.served() };
  },

  // What changes on any replica is told on the standalone stream, and on no other (F11, F12).
  async stream(url) {
    const s = await Session.open(url);
    let changes = 0;
    s.onNotification('notifications/tools/list_changed', () => {
      changes++;
    });
    await s.listening();
    const before = s.wire.exchanges.length;
    for (let i = 1; i <= 3; i++) {
      await s.call('test_trigger_tool_change');
      await until(() => changes >= i, `told of ${i} changes, was told of ${changes}`);
    }
    const calls = s.wire.exchanges.slice(before);
    assert.ok(calls.every((x) => !x.body.includes('list_changed')), 'told on the stream of a call');
    await s.close();
    return { raisedOn: [...new Set(calls.map((x) => x.servedBy))], served: s.wire.served() };
  },

  // The stream of a call is cut in the middle; the SDK resumes it, on another replica, and misses nothing (F11). Needs a
  // server that keeps events (--history).
  async resume(url) {
    const s = await Session.open(url);
    const hops = [];
    for (let round = 0; round < 2; round++) {
      s.wire.cut = (x) => (x.isCall ? (body) => body.includes('"progress":1') : undefined);
      const before = s.wire.exchanges.length;
      const seen = [];
      assert.equal(await s.call('slow', { seconds: 2 }, { onprogress: (p) => seen.push(p.progress) }), 'took 2 s');
      assert.deepEqual(seen, [1, 2]);
      const exchanges = s.wire.exchanges.slice(before);
      const [call, resumed] = [exchanges.find((x) => x.isCall), exchanges.find((x) => x.resumes)];
      assert.ok(!call.ended && !call.body.includes('took'), 'the call was not cut');
      assert.equal(resumed.status, 200);
      assert.ok(resumed.body.includes('took'), 'the answer came on the resumed stream');
      hops.push([call.servedBy, resumed.servedBy]);
    }
    await s.close();
    return { hops, served: s.wire.served() };
  },

  // A cancelled call's handler is told, on whichever replica it runs (F10).
  async cancel(url) {
    const s = await Session.open(url);
    const hops = [];
    for (let round = 0; round < 3; round++) {
      const before = s.wire.exchanges.length;
      const [name, enough] = [`${s.transport.sessionId} ${round}`, new AbortController()];
      await assert.rejects(s.call('test_wait', { name }, { signal: enough.signal, onprogress: () => enough.abort('enough') }));
      const cancel = () => s.wire.exchanges.slice(before).find((x) => x.message?.method === 'notifications/cancelled');
      await until(() => cancel()?.status === 202, 'the cancellation is accepted');
      hops.push([s.wire.exchanges[before].servedBy, cancel().servedBy]);
      // The replica that ran it knows; each call meets another one.
      let end;
      await until(async () => {
        end = JSON.parse(await s.call('test_waits'))[name];
        return end !== undefined;
      }, 'the handler has ended');
      assert.equal(end.cause, 'context canceled');
    }
    await s.close();
    return { hops, served: s.wire.served() };
  },

  // The revision without sessions: lists, calls, progress, questions in results, changes on a subscription (N2, F12). Needs
  // version 2.
  async modern(url) {
    const s = await Session.open(url, { more: { versionNegotiation: { mode: { pin: '2026-07-28' } } } });
    s.onRequest('elicitation/create', () => ({ action: 'accept', content: { name: 'Ada' } }));
    const uri = 'test://watched-resource';
    const updated = [];
    s.onNotification('notifications/resources/updated', ({ params }) => {
      updated.push(params.uri);
    });
    assert.ok((await s.client.listTools()).tools.some((t) => t.name === 'echo'));
    for (const text of ['hello', 'x'.repeat(200_000)]) {
      assert.equal(await s.call('echo', { text }), text);
    }
    const seen = [];
    assert.equal(await s.call('slow', { seconds: 2 }, { onprogress: (p) => seen.push(p.progress) }), 'took 2 s');
    assert.deepEqual(seen, [1, 2]);
    assert.match(await s.call('test_input_required_result_elicitation'), /Ada/);
    const subscription = await s.client.listen({ resourceSubscriptions: [uri] });
    const before = s.wire.exchanges.length;
    for (let i = 0; i < 3; i++) {
      await s.call('test_update_resource', { uri });
    }
    const raisedOn = new Set(s.wire.exchanges.slice(before).map((x) => x.servedBy));
    await until(() => updated.length >= 3, `3 updates, ${updated.length} were told`);
    assert.deepEqual(updated, [uri, uri, uri]);
    await subscription.close();
    await s.client.close();
    assert.ok(!s.transport.sessionId, 'a session id in an era without sessions');
    return { raisedOn: [...raisedOn], served: s.wire.served() };
  },

  // A tool that fails, one that does not exist, one that panics: an error each, and the session goes on (F14).
  async errors(url) {
    const s = await Session.open(url);
    assert.equal(await s.call('counter_add', { by: 7 }), '7');
    const failed = await s.client.callTool({ name: 'fail', arguments: { message: 'on purpose' } });
    assert.equal(failed.isError, true);
    assert.match(failed.content[0].text, /on purpose/);
    let unknown = '';
    try {
      const result = await s.client.callTool({ name: 'no_such_tool', arguments: {} });
      assert.equal(result.isError, true);
      unknown = result.content[0].text;
    } catch (e) {
      unknown = String(e);
    }
    let panicked = '';
    const begin = Date.now();
    try {
      const result = await s.client.callTool({ name: 'panic', arguments: {} });
      assert.equal(result.isError, true);
      panicked = result.content[0].text;
    } catch (e) {
      panicked = String(e);
    }
    assert.equal(await s.call('counter_add', { by: 1 }), '8');
    const ms = Date.now() - begin;
    assert.ok(ms < 5_000, `a panic held up the session for ${ms} ms`);
    await s.close();
    return { unknown, panicked, served: s.wire.served() };
  },

  // DELETE ends the session on every back-end and for every method (F13).
  async delete(url) {
    const s = await Session.open(url);
    assert.equal(await s.call('counter_add', { by: 1 }), '1');
    const headers = {
      'content-type': 'application/json',
      accept: 'application/json, text/event-stream',
      'mcp-session-id': s.transport.sessionId,
      'mcp-protocol-version': s.transport.protocolVersion,
    };
    await s.transport.terminateSession();
    const gone = s.wire.exchanges.at(-1);
    assert.equal(gone.method, 'DELETE');
    const after = [];
    for (let i = 0; i < 4; i++) {
      for (const [method, body] of [
        ['POST', JSON.stringify({ jsonrpc: '2.0', id: i, method: 'tools/list' })],
        ['POST', JSON.stringify({ jsonrpc: '2.0', method: 'notifications/roots/list_changed' })],
        ['GET', undefined],
      ]) {
        const response = await s.wire.fetch(url, { method, headers, body });
        await response.body?.cancel();
        after.push(response.status);
      }
    }
    assert.deepEqual(after, Array(12).fill(404), 'after DELETE');
    const again = await s.wire.fetch(url, { method: 'DELETE', headers });
    await again.body?.cancel();
    assert.ok(again.ok || again.status === 404, `a second DELETE: ${again.status}`);
    await s.close();
    return { status: gone.status, again: again.status, served: s.wire.served() };
  },

  // Answers get neither lost nor swapped: ten calls at a time and pairs of lists, all on one session. With the default
  // --rounds that is 1,000 calls and 400 lists.
  async load(url, rounds) {
    const s = await Session.open(url);
    let right = 0;
    const begin = Date.now();
    const calls = async () => {
      for (let round = 0; round < rounds; round++) {
        await Promise.all(
          Array.from({ length: 10 }, async (_, i) => {
            const text = `round ${round}, call ${i}`;
            assert.equal(await s.call('echo', { text }), text);
            right++;
          }),
        );
      }
    };
    const lists = async () => {
      for (let round = 0; round < 2 * rounds; round++) {
        const [tools, resources] = await Promise.all([s.client.listTools(), s.client.listResources()]);
        assert.ok(tools.tools.some((t) => t.name === 'echo') && !('resources' in tools), 'tools/list');
        assert.ok(resources.resources.length > 0 && !('tools' in resources), 'resources/list');
        right += 2;
      }
    };
    await Promise.all([calls(), lists()]);
    assert.equal(right, 14 * rounds);
    const ms = Date.now() - begin;
    await s.close();
    return { right, ms, served: s.wire.served() };
  },

  // Calls that change different values of one session at the same time all keep their change (F3).
  async notes(url) {
    const s = await Session.open(url);
    const keys = Array.from({ length: 50 }, (_, i) => `key ${i}`);
    await Promise.all(keys.map((key) => s.call('note_set', { key, value: `value of ${key}` })));
    const want = Object.fromEntries(keys.map((key) => [key, `value of ${key}`]));
    assert.deepEqual(JSON.parse(await s.call('notes_list')), want);
    await s.close();
    return { notes: keys.length, served: s.wire.served() };
  },

  // With the lock, calls that add to the same value run one after the other: every total comes up once (F4).
  async 'parallel-counter'(url) {
    const s = await Session.open(url);
    const totals = await Promise.all(Array.from({ length: 50 }, () => s.call('counter_add', { by: 1 })));
    assert.deepEqual(totals.map(Number).sort((a, b) => a - b), Array.from({ length: 50 }, (_, i) => i + 1));
    assert.equal(await s.call('counter_add', { by: 0 }), '50');
    await s.close();
    return { total: 50, served: s.wire.served() };
  },

  // 200 calls at once, some of them with much to carry each way.
  async 'parallel-200'(url) {
    const s = await Session.open(url);
    const texts = Array.from({ length: 200 }, (_, i) => `call ${i} `.repeat(i % 10 === 0 ? 5_000 : 1));
    assert.deepEqual(await Promise.all(texts.map((text) => s.call('echo', { text }))), texts);
    await s.close();
    return { right: texts.length, served: s.wire.served() };
  },

  // A proxy cuts what is idle. A call and the standalone stream that are silent for longer than its 15 s both go on: the
  // call's answer arrives, and what changes afterwards is told on the stream that was opened at the beginning (F19). Needs
  // a server that runs with --everything.
  async idle(url) {
    const s = await Session.open(url);
    let changes = 0;
    s.onNotification('notifications/tools/list_changed', () => {
      changes++;
    });
    const streams = () => s.wire.exchanges.filter((x) => x.method === 'GET');
    await until(() => streams().some((x) => x.status === 200), 'a standalone stream');
    assert.equal(await s.call('slow', { seconds: 17 }), 'took 17 s');
    changes = 0; // another client may have changed the list, which is everybody's
    await s.call('test_trigger_tool_change');
    await until(() => changes > 0, 'told of the change');
    assert.equal(streams().length, 1, 'the stream was cut and opened again');
    assert.equal(streams()[0].ended, false, 'the stream has ended');
    assert.ok(streams()[0].body.includes('notifications/tools/list_changed'), 'told on the stream');
    await s.close();
    return { served: s.wire.served() };
  },

  // The same for a modern client's subscription, and for its call, which it would cancel by going away. Needs version 2.
  async 'idle-modern'(url) {
    const s = await Session.open(url, { more: { versionNegotiation: { mode: { pin: '2026-07-28' } } } });
    const uri = 'test://watched-resource';
    let updates = 0;
    s.onNotification('notifications/resources/updated', () => {
      updates++;
    });
    const subscription = await s.client.listen({ resourceSubscriptions: [uri] });
    assert.equal(await s.call('slow', { seconds: 17 }), 'took 17 s');
    updates = 0; // another client may have updated it
    await s.call('test_update_resource', { uri });
    await until(() => updates > 0, 'told of the update');
    const streams = s.wire.exchanges.filter((x) => x.message?.method === 'subscriptions/listen');
    assert.equal(streams.length, 1, 'the subscription was cut and opened again');
    await subscription.close();
    await s.client.close();
    return { served: s.wire.served() };
  },

  // One call for each line on standard input ({"tool": ..., "args": ...}), one line of output for each; the test breaks
  // things in between. A call that fails is reported, not fatal.
  async steps(url) {
    const s = await Session.open(url);
    s.onRequest('elicitation/create', () => ({ action: 'accept', content: { answer: 'yes' } }));
    print({ sessionId: s.transport.sessionId });
    for await (const line of createInterface({ input: process.stdin })) {
      const { tool, args } = JSON.parse(line);
      const before = s.wire.exchanges.length;
      let answer;
      try {
        answer = { text: await s.call(tool, args) };
      } catch (e) {
        answer = { error: String(e) };
      }
      const call = s.wire.exchanges.slice(before).find((x) => x.isCall);
      print({ ...answer, status: call?.status, servedBy: call?.servedBy });
    }
    await s.close();
    return { served: s.wire.served() };
  },
};

/** Waits until something is so. */
async function until(is, what) {
  for (const end = Date.now() + 10_000; !(await is()); ) {
    assert.ok(Date.now() < end, `in vain: ${what}`);
    await new Promise((done) => setTimeout(done, 10));
  }
}

function print(line) {
  process.stdout.write(JSON.stringify(line) + '\n');
}

let args;
try {
  args = parseArgs({ options: { url: { type: 'string' }, sdk: { type: 'string', default: '1' }, rounds: { type: 'string', default: '100' } }, allowPositionals: true });
  assert.ok(args.values.url && args.positionals.length > 0 && Number(args.values.rounds) > 0, 'usage: node driver.mjs --url URL [--sdk 1|2] [--rounds N] SCENARIO...');
  assert.ok(SDKS[args.values.sdk], `no version ${args.values.sdk} of the SDK`);
  for (const name of args.positionals) {
    assert.ok(scenarios[name], `no scenario ${name}; there are: ${Object.keys(scenarios).join(', ')}`);
  }
} catch (e) {
  process.stderr.write(`${e.message}\n`);
  process.exit(2);
}

sdk = await SDKS[args.values.sdk]();
for (const scenario of args.positionals) {
  const begin = Date.now();
  try {
    const facts = await scenarios[scenario](new URL(args.values.url), Number(args.values.rounds));
    print({ scenario, ok: true, took_ms: Date.now() - begin, ...facts });
  } catch (e) {
    print({ scenario, ok: false, took_ms: Date.now() - begin, error: e.stack ?? String(e) });
    process.exitCode = 1;
  }
}
// A scenario that failed in the middle leaves its streams open.
process.exit();

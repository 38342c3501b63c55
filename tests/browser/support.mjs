// Test fixtures: the real binary, an upstream, a Redis server and Chromium.

import { spawn } from 'node:child_process';
import { once } from 'node:events';
import { mkdirSync, mkdtempSync, readFileSync, renameSync, rmSync, writeFileSync } from 'node:fs';
import http from 'node:http';
import { createServer } from 'node:net';
import { tmpdir } from 'node:os';
import path from 'node:path';
import { fileURLToPath } from 'node:url';
import { chromium } from 'playwright-core';

const root = fileURLToPath(new URL('../..', import.meta.url));
const target = process.env.CARGO_TARGET_DIR ? path.resolve(root, process.env.CARGO_TARGET_DIR) : path.join(root, 'target');
const binary = process.env.TIDEGATE ?? path.join(target, 'debug/tidegate');
export const shots = process.env.TIDEGATE_SHOTS ?? path.join(target, 'browser');
mkdirSync(shots, { recursive: true });

export const TOKEN = 's3cret';
/** Timeout of each wait, long enough for a busy machine. */
const WAIT_TIMEOUT_MS = 20_000;

/** Polls `probe` until it returns a truthy value. Throws after `within_ms`. */
export async function until(what, probe, within_ms = WAIT_TIMEOUT_MS) {
  const end = Date.now() + within_ms;
  for (;;) {
    const found = await probe();
    if (found) return found;
    if (Date.now() > end) throw new Error(`waited ${within_ms} ms for ${what}`);
    await new Promise((done) => setTimeout(done, 25));
  }
}

/** An upstream that answers every request. */
export async function startUpstream() {
  const server = http.createServer((request, response) => {
    request.resume();
    response.end('hello\n');
  });
  server.listen(0, '127.0.0.1');
  await once(server, 'listening');
  return { url: `http://127.0.0.1:${server.address().port}`, end: () => { server.closeAllConnections(); server.close(); } };
}

/** A running proxy with an admin token. */
export class Proxy {
  static async start(config, { admin = '127.0.0.1:0', upstream, env = {} } = {}) {
    const proxy = new Proxy();
    proxy.dir = mkdtempSync(path.join(tmpdir(), 'tidegate-'));
    writeFileSync(path.join(proxy.dir, 'token'), `${TOKEN}\n`);
    proxy.config = path.join(proxy.dir, 'config.toml');
    proxy.upstream = upstream ?? await startUpstream();
    proxy.head = `admin.address = "${admin}"\nadmin.token_file = "${proxy.dir}/token"\n`;
    proxy.write(config);
    const flags = ['run', '--config', proxy.config, '--listen', '127.0.0.1:0', '--upstream', proxy.upstream.url];
    proxy.child = spawn(binary, flags, { stdio: ['ignore', 'ignore', 'pipe'], env });
    proxy.log = '';
    proxy.child.stderr.on('data', (bytes) => { proxy.log += bytes; });
    proxy.ended = once(proxy.child, 'exit');
    const address = (message) => proxy.lines().find((line) => line.message === message)?.address;
    await until(`the proxy to listen: ${proxy.log}`, () => address('listening') ?? (proxy.child.exitCode !== null && 'ended'));
    if (proxy.child.exitCode !== null) throw new Error(proxy.log);
    proxy.url = `http://${address('listening')}`;
    proxy.admin = `http://${address('admin listening').replace('0.0.0.0', '127.0.0.1')}`;
    return proxy;
  }

  /** Replaces the configuration file atomically, as editors do. */
  write(config) {
    writeFileSync(`${this.config}.new`, this.head + config);
    renameSync(`${this.config}.new`, this.config);
  }

  lines() {
    return this.log.split('\n').flatMap((line) => { try { const { fields, ...rest } = JSON.parse(line); return [{ ...rest, ...fields }]; } catch { return []; } });
  }

  async status(target, headers = {}) {
    const request = http.request(this.url + target, { headers, agent: this.agent ??= new http.Agent({ keepAlive: true }) });
    request.end();
    const [response] = await once(request, 'response');
    response.resume();
    await once(response, 'end');
    return response.statusCode;
  }

  async sendMany(times, target, headers) {
    const seen = {};
    for (let n = 0; n < times; n += 1) {
      const status = await this.status(target, headers);
      seen[status] = (seen[status] ?? 0) + 1;
    }
    return seen;
  }

  async fetchAdmin(target) {
    const answer = await fetch(this.admin + target, { headers: { Authorization: `Bearer ${TOKEN}` } });
    return answer.json();
  }

  async end() {
    this.agent?.destroy();
    this.child.kill('SIGKILL');
    await this.ended;
    this.upstream.end();
    rmSync(this.dir, { recursive: true, force: true });
  }
}

/** A Redis server that can be killed and restarted. */
export class Redis {
  /** Starts a server with further flags. */
  static async start(...flags) {
    const redis = Object.assign(new Redis(), { flags });
    const probe = createServer().listen(0, '127.0.0.1');
    await once(probe, 'listening');
    redis.port = probe.address().port;
    probe.close();
    await once(probe, 'close');
    redis.dir = mkdtempSync(path.join(tmpdir(), 'tidegate-redis-'));
    redis.launch();
    return redis;
  }

  launch() {
    const flags = ['--port', String(this.port), '--bind', '127.0.0.1', '--save', '', '--dir', this.dir, ...this.flags];
    this.child = spawn('redis-server', flags, { stdio: 'ignore' });
    this.ended = once(this.child, 'exit');
  }

  async kill() {
    this.child.kill('SIGKILL');
    await this.ended;
  }

  async end() {
    await this.kill();
    rmSync(this.dir, { recursive: true, force: true });
  }
}

let browser;
export async function openBrowser() {
  const executablePath = process.env.CHROMIUM ?? '/usr/bin/chromium';
  browser = await chromium.launch({ executablePath, args: ['--no-sandbox', '--disable-gpu'] });
}
export const closeBrowser = () => browser?.close();

/**
 * Opens the dashboard in a new window. `faults` collects script errors and violations of the content
 * security policy.
 */
export async function dashboard(proxy, { dark = false, phone = false, viewport, hash = '', motion = 'no-preference', prepare } = {}) {
  const context = await browser.newContext({
    colorScheme: dark ? 'dark' : 'light',
    reducedMotion: motion,
    viewport: viewport ?? (phone ? { width: 360, height: 740 } : { width: 1280, height: 900 }),
    locale: 'en-GB',
    timezoneId: 'UTC',
  });
  context.setDefaultTimeout(WAIT_TIMEOUT_MS);
  const page = await context.newPage();
  page.faults = [];
  page.on('pageerror', (error) => page.faults.push(error.message));
  page.on('console', (message) => {
    // The browser also logs failed requests. The page reports them to the user, so they are ignored.
    if (message.type() === 'error' && !message.text().startsWith('Failed to load resource')) page.faults.push(message.text());
  });
  await prepare?.(page);
  await page.goto(`${proxy.admin}/${hash}`);
  return page;
}

const axe = readFileSync(new URL('node_modules/axe-core/axe.min.js', import.meta.url), 'utf8');

/** Returns the accessibility violations that axe-core finds, with the elements. */
export async function findViolations(page) {
  // The content security policy of the page does not apply to code that the debugger evaluates.
  await page.evaluate(axe);
  const { violations } = await page.evaluate(() => axe.run(document, { resultTypes: ['violations'] }));
  return violations.flatMap(({ id, nodes }) => nodes.map((node) => `${id}: ${node.html.slice(0, 120)} ${node.any[0]?.message ?? ''}`));
}

export async function shot(page, name) {
  await page.screenshot({ path: path.join(shots, `${name}.png`), fullPage: !(await page.locator('dialog[open]').count()) });
}

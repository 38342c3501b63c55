// How Node and its frameworks read a body. Arguments: NAME=PORT for each.
//
// Each answers with the fields that it read, or 400 if it rejects the body or does not parse this type.
import http from 'node:http'
import express4 from 'express4'
import express5 from 'express5'
import fastify from 'fastify'
import hapi from '@hapi/hapi'
import * as h3 from 'h3'
import * as h3v1 from 'h3v1'

function shown(value) {
  if (typeof value === 'number') return { n: Number.isInteger(value) ? BigInt(value).toString() : String(value) }
  if (Array.isArray(value)) return { t: 'list' }
  if (value && typeof value === 'object') return { t: 'object' }
  return value
}

// The fields of a document. A list has none. h3 1 returns the text of what it cannot parse.
function fields(document) {
  if (document === undefined || typeof document === 'string') throw new Error('not parsed')
  const found = {}
  for (const name of ['model', 'method', 'max_tokens']) {
    if (document?.[name] !== undefined) found[name] = shown(document[name])
  }
  if (document?.params?.name !== undefined) found.name = shown(document.params.name)
  return found
}

async function read(req) {
  const parts = []
  for await (const part of req) parts.push(part)
  return Buffer.concat(parts)
}

const raw = (parse) => (port) =>
  http.createServer(async (req, res) => {
    let status = 200
    let answer
    try {
      answer = fields(parse(await read(req), req))
    } catch (error) {
      status = 400
      answer = { error: error.message }
    }
    res.statusCode = status
    res.end(JSON.stringify(answer))
  }).listen(port, '127.0.0.1')

function express(framework, isParsed) {
  return (port) => {
    const app = framework()
    app.use(framework.json({ limit: '10mb' }), framework.urlencoded({ extended: true, limit: '10mb' }))
    app.post('/', (req, res) => (isParsed(req) ? res.json(fields(req.body)) : res.status(400).end()))
    app.use((error, _req, res, _next) => res.status(400).end(error.message))
    app.listen(port, '127.0.0.1')
  }
}

function fastifyApp(port) {
  const app = fastify({ bodyLimit: 1e7 })
  app.post('/', (req) => fields(req.body))
  app.setErrorHandler((error, _req, reply) => reply.code(400).send({ error: error.message }))
  app.listen({ port, host: '127.0.0.1' })
}

async function hapiApp(port) {
  const server = hapi.server({ port, host: '127.0.0.1' })
  const payload = { maxBytes: 1e7, multipart: { output: 'data' } }
  server.route({ method: 'POST', path: '/', options: { payload }, handler: (req) => fields(req.payload) })
  await server.start()
}

// Hono's server and restify change classes of Node, so they are imported only if asked for.
function honoApp(parse) {
  return async (port) => {
    const { Hono } = await import('hono')
    const { serve } = await import('@hono/node-server')
    const app = new Hono()
    app.post('/', async (c) => c.json(fields(await parse(c.req))))
    app.onError((error, c) => c.json({ error: error.message }, 400))
    serve({ fetch: app.fetch, port, hostname: '127.0.0.1', overrideGlobalObjects: false })
  }
}

function h3App(port) {
  const app = new h3.H3()
  app.post('/', async (event) => fields(await event.req.json()))
  h3.serve(app, { port, hostname: '127.0.0.1', silent: true })
}

function h3v1App(port) {
  const app = h3v1.createApp()
  app.use('/', h3v1.eventHandler(async (event) => fields(await h3v1.readBody(event))))
  http.createServer(h3v1.toNodeListener(app)).listen(port, '127.0.0.1')
}

async function restifyApp(port) {
  const { default: restify } = await import('restify')
  const server = restify.createServer()
  server.use(restify.plugins.bodyParser({ mapParams: false }))
  server.post('/', async (req, res) => res.send(fields(req.body)))
  server.listen(port, '127.0.0.1')
}

const apps = {
  node: raw((body) => JSON.parse(body.toString())),
  'node-form': raw((body, req) => {
    if (!isForm(req.headers['content-type'])) throw new Error('no form')
    return Object.fromEntries(new URLSearchParams(body.toString()))
  }),
  // The reader of a Response, as in handlers with the Fetch API.
  fetch: raw((body) => JSON.parse(new TextDecoder().decode(body))),
  express4: express(express4, (req) => req._body),
  express5: express(express5, (req) => req.body !== undefined),
  fastify: fastifyApp,
  hapi: hapiApp,
  hono: honoApp((req) => req.json()),
  'hono-form': honoApp(async (req) => {
    if (!isForm(req.header('content-type'))) throw new Error('no form')
    return req.parseBody()
  }),
  h3: h3App,
  'h3-v1': h3v1App,
  restify: restifyApp,
}

function isForm(type) {
  return /form-urlencoded|form-data/i.test(type ?? '')
}

for (const argument of process.argv.slice(2)) {
  const [name, port] = argument.split('=')
  await apps[name](Number(port))
}

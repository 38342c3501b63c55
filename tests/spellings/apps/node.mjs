// The Node frameworks. Arguments: NAME=PORT for each.
//
// Every app has the same handlers: login, account (/login/{user}), admin, public, healthz and search. Each answers with
// its name and the values that it read.
import http from 'node:http'
import Koa from 'koa'
import KoaRouter from '@koa/router'
import cookieParser from 'cookie-parser'
import express4 from 'express4'
import express5 from 'express5'
import fastify from 'fastify'
import fastifyCookie from '@fastify/cookie'
import * as h3 from 'h3'
import * as h3v1 from 'h3v1'
import hapi from '@hapi/hapi'
import { Hono } from 'hono'
import { getCookie } from 'hono/cookie'
import polka from 'polka'

const text = (value) => (value === undefined || value === null ? null : String(value))
const found = (handler, values = {}) => ({ handler, ...values })
const search = (session, key, auth, user, host) =>
  found('search', {
    session: text(session), api_key: text(key), authorization: text(auth), x_user: text(user), host: text(host),
  })

// The token or user of Authorization. Node has no reader of its own, so each app has one that is common in handlers.
function readCredentials(header, readToken) {
  const credentials = readToken(header ?? '')
  if (/^\s*basic\s/i.test(header ?? '')) return Buffer.from(credentials, 'base64').toString().split(':')[0]
  return /^\s*bearer\s/i.test(header ?? '') ? credentials : null
}
const secondWord = (header) => header.split(' ')[1] ?? ''
const lastWord = (header) => header.trim().split(/\s+/).pop()
const afterScheme = (header) => header.replace(/^\s*\S+\s+/, '')

function express(framework, wildcard, readToken) {
  const app = framework()
  app.use(cookieParser())
  app.get('/login', (_req, res) => res.json(found('login')))
  app.get('/login/:user', (req, res) => res.json(found('account', { user: text(req.params.user) })))
  app.get(`/admin/${wildcard}`, (_req, res) => res.json(found('admin')))
  app.get(`/public/${wildcard}`, (_req, res) => res.json(found('public')))
  app.get('/healthz', (_req, res) => res.json(found('healthz')))
  app.get('/search', (req, res) => {
    const credentials = readCredentials(req.get('authorization'), readToken)
    res.json(search(req.cookies.session, req.query.api_key, credentials, req.get('x-user'), req.hostname))
  })
  return (port) => app.listen(port, '127.0.0.1')
}

function fastifyApp(port) {
  const app = fastify()
  app.register(fastifyCookie)
  app.get('/login', () => found('login'))
  app.get('/login/:user', (req) => found('account', { user: text(req.params.user) }))
  app.get('/admin/*', () => found('admin'))
  app.get('/public/*', () => found('public'))
  app.get('/healthz', () => found('healthz'))
  const read = (req) => {
    const credentials = readCredentials(req.headers.authorization, afterScheme)
    return search(req.cookies.session, req.query.api_key, credentials, req.headers['x-user'], req.hostname)
  }
  app.after(() => app.get('/search', read))
  app.listen({ port, host: '127.0.0.1' })
}

function koa(port) {
  const router = new KoaRouter()
  const route = (path, handler) => router.get(path, (ctx) => { ctx.body = handler(ctx) })
  route('/login', () => found('login'))
  route('/login/:user', (ctx) => found('account', { user: text(ctx.params.user) }))
  route('/admin/*rest', () => found('admin'))
  route('/public/*rest', () => found('public'))
  route('/healthz', () => found('healthz'))
  const read = (ctx) => search(ctx.cookies.get('session'), ctx.query.api_key, null, ctx.get('x-user'), ctx.hostname)
  route('/search', read)
  new Koa().use(router.routes()).listen(port, '127.0.0.1')
}

function routesOfH3(router, library) {
  const event = library.defineEventHandler
  router.get('/login', event(() => found('login')))
  router.get('/login/:user', event((it) => found('account', { user: text(library.getRouterParam(it, 'user')) })))
  router.get('/admin/**', event(() => found('admin')))
  router.get('/public/**', event(() => found('public')))
  router.get('/healthz', event(() => found('healthz')))
  const read = (it) => {
    const values = [library.getRequestHeader(it, 'x-user'), library.getRequestHost(it)]
    return search(library.getCookie(it, 'session'), library.getQuery(it).api_key, null, ...values)
  }
  router.get('/search', event(read))
  return router
}

function h3App(port) {
  const app = routesOfH3(new h3.H3(), h3)
  h3.serve(app, { port, hostname: '127.0.0.1', silent: true, gracefulShutdown: false })
}

function h3v1App(port) {
  const app = h3v1.createApp().use(routesOfH3(h3v1.createRouter(), h3v1))
  http.createServer(h3v1.toNodeListener(app)).listen(port, '127.0.0.1')
}

async function hapiApp(port) {
  const server = hapi.server({ port, host: '127.0.0.1' })
  const route = (path, handler) => server.route({ method: 'GET', path, handler })
  route('/login', () => found('login'))
  route('/login/{user}', (req) => found('account', { user: text(req.params.user) }))
  route('/admin/{rest*}', () => found('admin'))
  route('/public/{rest*}', () => found('public'))
  route('/healthz', () => found('healthz'))
  route('/search', (req) =>
    search(req.state.session, req.query.api_key, null, req.headers['x-user'], req.info.hostname))
  await server.start()
}

async function honoApp(port) {
  const { serve } = await import('@hono/node-server')
  const app = new Hono()
  app.get('/login', (it) => it.json(found('login')))
  app.get('/login/:user', (it) => it.json(found('account', { user: text(it.req.param('user')) })))
  app.get('/admin/*', (it) => it.json(found('admin')))
  app.get('/public/*', (it) => it.json(found('public')))
  app.get('/healthz', (it) => it.json(found('healthz')))
  app.get('/search', (it) => {
    const values = [it.req.header('x-user'), new URL(it.req.url).hostname]
    return it.json(search(getCookie(it, 'session'), it.req.query('api_key'), null, ...values))
  })
  serve({ fetch: app.fetch, port, hostname: '127.0.0.1' })
}

function polkaApp(port) {
  const app = polka()
  const route = (path, read) => app.get(path, (req, res) => res.end(JSON.stringify(read(req))))
  route('/login', () => found('login'))
  route('/login/:user', (req) => found('account', { user: text(req.params.user) }))
  route('/admin/*', () => found('admin'))
  route('/public/*', () => found('public'))
  route('/healthz', () => found('healthz'))
  route('/search', (req) => search(null, req.query.api_key, null, req.headers['x-user'], req.headers.host))
  app.listen(port, '127.0.0.1')
}

async function restifyApp(port) {
  const { default: restify } = await import('restify')
  const server = restify.createServer()
  server.use(restify.plugins.queryParser())
  const route = (path, read) => server.get(path, (req, res, next) => { res.json(read(req)); next() })
  route('/login', () => found('login'))
  route('/login/:user', (req) => found('account', { user: text(req.params.user) }))
  route('/admin/*', () => found('admin'))
  route('/public/*', () => found('public'))
  route('/healthz', () => found('healthz'))
  const read = (req) => {
    const { scheme, credentials, basic } = req.authorization ?? {}
    const user = basic ? basic.username : scheme?.toLowerCase() === 'bearer' ? credentials : null
    return search(null, req.query.api_key, user, req.header('x-user'), req.headers.host)
  }
  server.use(restify.plugins.authorizationParser())
  route('/search', read)
  server.listen(port, '127.0.0.1')
}

// Node without a framework, as its documentation reads targets.
function nodeUrl(port) {
  const read = (req) => {
    const url = new URL(req.url, `http://${req.headers.host}`)
    const [, first, second, ...rest] = decodeURIComponent(url.pathname).split('/')
    if (first === 'login' && second === undefined) return found('login')
    if (first === 'login' && second !== '' && rest.length === 0) return found('account', { user: second })
    if (first === 'admin' && second !== undefined) return found('admin')
    if (first === 'public' && second !== undefined) return found('public')
    if (first === 'healthz' && second === undefined) return found('healthz')
    if (first === 'search' && second === undefined) {
      return search(null, url.searchParams.get('api_key'), null, req.headers['x-user'], url.hostname)
    }
    return null
  }
  const server = http.createServer((req, res) => {
    let answer = null
    try {
      answer = read(req)
    } catch {
      // A target that is no URL.
    }
    res.writeHead(answer ? 200 : 404, { 'content-type': 'application/json' }).end(JSON.stringify(answer ?? {}))
  })
  server.listen(port, '127.0.0.1')
}

const apps = {
  express4: express(express4, '*', secondWord),
  express5: express(express5, '*rest', lastWord),
  fastify: fastifyApp,
  hapi: hapiApp,
  hono: honoApp,
  polka: polkaApp,
  restify: restifyApp,
  h3: h3App,
  'h3-v1': h3v1App,
  koa,
  node: nodeUrl,
}

// A handler that throws closes no other app.
process.on('uncaughtException', () => {})
process.on('unhandledRejection', () => {})
console.error = () => {}
for (const argument of process.argv.slice(2)) {
  const [name, port] = argument.split('=')
  apps[name](Number(port))
}

// A client of the E2B wire, as the SDK for JavaScript makes it: `node e2b_scenario.mjs`, in a folder
// that has the npm package `e2b`, with its variables E2B_API_URL, E2B_SANDBOX_URL, E2B_API_KEY.
//
// It prints one JSON line for each step, with the step's name and what the SDK gave or threw.
import { Sandbox } from 'e2b'

async function step(name, work) {
  let value
  let told
  try {
    value = await work()
    told = { gave: value instanceof Object && 'pid' in value ? value.pid > 0 : value }
  } catch (error) {
    told = { raised: error.constructor.name, text: error.message, exitCode: error.exitCode }
  }
  console.log(JSON.stringify({ step: name, ...told }))
  return value
}

async function commands(box) {
  const run = async (...words) => (await box.commands.run(...words)).stdout
  await step('run', () => run('echo hi $X $Y; echo err >&2; pwd', { envs: { Y: '2' } }))
  await step('run-fails', () => run('exit 3', { user: 'root' }))
  await step('run-no-cwd', () => run('pwd', { cwd: '/nowhere' }))
  await step('run-timeout', () => run('sleep 60', { timeoutMs: 1000 }))
  await step('run-connect-none', () => box.commands.connect(9999))
  const parts = []
  await step('run-streams', async () => {
    await run('echo 1; sleep 1; echo 2', { onStdout: (part) => parts.push(part) })
    return parts
  })
  const loop = await step('background', () => box.commands.run(
    'for i in 1 2 3; do echo $i; sleep 0.4; done; exit 4', { background: true }))
  await step('beside', () => run('echo beside'))
  await step('list', async () => (await box.commands.list()).map((each) => each.pid === loop.pid))
  await step('wait', () => loop.wait())
  const cat = await step('cat', () => box.commands.run('cat; echo done', {
    background: true, stdin: true }))
  await step('cat-send', () => box.commands.sendStdin(cat.pid, 'hello\n'))
  await step('cat-close', () => box.commands.closeStdin(cat.pid))
  await step('cat-wait', async () => (await cat.wait()).stdout)
  await step('together', async () => Promise.all(
    [1, 2, 3, 4, 5].map((number) => run(`sleep 0.2; echo ${number}`))))
}

async function files(box) {
  await step('write', async () => (await box.files.write('/tmp/a/ä 1', 'text')).path)
  await step('read', () => box.files.read('/tmp/a/ä 1'))
  await step('read-missing', () => box.files.read('/tmp/a/none'))
  await step('write-bytes', async () => (await box.files.write(
    'b.bin', new Uint8Array([0, 255, 13, 10]).buffer)).path)
  await step('read-bytes', async () => [...await box.files.read('b.bin', { format: 'bytes' })])
  await step('write-stream', async () => (await box.files.write(
    '/tmp/stream', new Blob(['abcd']).stream())).path)
  await step('ls', async () => (await box.files.list('/tmp/a')).map((e) => [e.name, e.type, e.size]))
  await step('watch-missing', () => box.files.watchDir('/none', () => {}))
  const events = []
  const watcher = await step('watch', () => box.files.watchDir(
    '/tmp/a', (event) => events.push([event.name, event.type]), { timeoutMs: 60000 }))
  await box.files.write('/tmp/a/new', '1')
  while (events.length < 2) await new Promise((next) => setTimeout(next, 50))
  await watcher.stop()
  await step('events', () => events)
  await step('signed', async () => (await fetch(await box.downloadUrl('/tmp/a/new'))).text())
}

async function terminal(box) {
  let heard = ''
  const pty = await step('pty', () => box.pty.create({
    rows: 24, cols: 80, onData: (data) => { heard += Buffer.from(data).toString() } }))
  await box.pty.resize(pty.pid, { rows: 30, cols: 90 })
  await box.pty.sendInput(pty.pid, new TextEncoder().encode('stty size; exit 5\n'))
  await step('pty-wait', () => pty.wait())
  await step('pty-heard', () => heard.includes('30 90'))
}

const box = await Sandbox.create({ timeoutMs: 120000, metadata: { cpus: '1-2' }, envs: { X: '1' } })
await commands(box)
await files(box)
await terminal(box)
await step('is-running', () => box.isRunning())
await step('pause', () => box.pause())
await step('no-template', () => Sandbox.create('nothing'))
await step('kill', () => box.kill())
await step('kill-again', () => box.kill())
await step('run-after', () => box.commands.run('echo x'))
process.exit(0)

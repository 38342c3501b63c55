"""Answers with the request head that it received, to show what a proxy forwards. Argument: the port."""

import asyncio
import sys


class Echo(asyncio.Protocol):
    def __init__(self):
        self.received = b""

    def connection_made(self, transport):
        self.transport = transport

    def data_received(self, data):
        self.received += data
        while b"\r\n\r\n" in self.received:
            head, _, self.received = self.received.partition(b"\r\n\r\n")
            head += b"\r\n\r\n"
            length = str(len(head)).encode()
            self.transport.write(b"HTTP/1.1 200 OK\r\nX-Reached: app\r\nContent-Length: " + length + b"\r\n\r\n" + head)


async def serve(port):
    server = await asyncio.get_running_loop().create_server(Echo, "127.0.0.1", port)
    await server.serve_forever()


if __name__ == "__main__":
    asyncio.run(serve(int(sys.argv[1])))

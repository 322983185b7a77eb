"""Sends many requests at once, reads two streams together, and stops what takes too long."""

import asyncio

import pbhost

CITIES = ["Lima", "Oslo", "Riga", "Suva", "Atlantis"]


async def main() -> None:
    async with pbhost.AsyncClient("localhost:8001") as client:
        await look_up(client)
        await read_streams(client)
        await give_up(client)


async def look_up(client: pbhost.AsyncClient) -> None:
    """Has at most three requests in flight; a failed one fails alone."""
    limit = asyncio.Semaphore(3)

    async def ask(city: str) -> int:
        async with limit:
            return (await client.infer("lookup", CITY=city))["POPULATION"].item()

    answers = await asyncio.gather(*map(ask, CITIES), return_exceptions=True)
    for city, answer in zip(CITIES, answers, strict=True):
        print(f"{city}: {answer}")


async def read_streams(client: pbhost.AsyncClient) -> None:
    async def first(count: int, every: float) -> list[int]:
        ticks = []
        async with client.stream("ticker", EVERY=every) as stream:  # leaving it cancels the request
            async for part in stream:
                ticks.append(part["TICK"].item())
                if len(ticks) == count:
                    break
        return ticks

    print(await asyncio.gather(first(5, every=0.01), first(3, every=0.02)))


async def give_up(client: pbhost.AsyncClient) -> None:
    """A timeout of asyncio cancels the request, and the model's `is_cancelled()` is true."""

    async def read_on() -> None:
        async for _ in client.stream("ticker", EVERY=0.01):
            pass

    try:
        await asyncio.wait_for(read_on(), timeout=0.2)
    except asyncio.TimeoutError:
        print("the ticker was stopped")


asyncio.run(main())

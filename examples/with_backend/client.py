"""Looks up the atoms of table salt and of water."""

import pbhost

with pbhost.Client("localhost:8001") as client:
    for atoms in (["Na", "Cl"], ["H", "H", "O"]):
        result = client.infer("elements", SYMBOL=atoms)
        names = ", ".join(name.decode() for name in result["NAME"])
        print(f"{names}: together {result['WEIGHT'].sum():.3f} u")

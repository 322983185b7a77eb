"""Clients in languages for which `protoc` generates the code of Triton's gRPC protocol."""

from __future__ import annotations

import subprocess
from dataclasses import dataclass
from pathlib import Path

from google.protobuf import descriptor_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

JARS = Path("/usr/share/java")
JAVA_PLUGIN = "/usr/bin/grpc_java_plugin"


@dataclass(frozen=True)
class Language:
    """How to build and run a client. `packages` are Debian's, which have all files of `needs`."""

    packages: str
    needs: tuple[str, ...]
    build: str
    run: tuple[str, ...]

    def is_installed(self) -> bool:
        return all(Path(each).exists() for each in self.needs)

    def command(self, program: Path, folder: Path) -> list[str]:
        """Builds a client in an empty folder; returns the command that runs it.

        Raises RuntimeError with what the compiler says.
        """
        described = descriptor_pb2.FileDescriptorSet()
        for module in (model_config_pb2, service_pb2):
            module.DESCRIPTOR.CopyToProto(described.file.add())
        (folder / "triton.protoset").write_bytes(described.SerializeToString())
        build = f"set -e; cd {folder}; mkdir out\n" + self.build.format(program=program)
        done = subprocess.run(["bash", "-c", build], capture_output=True, text=True, check=False)
        if done.returncode:
            raise RuntimeError(done.stderr)
        return [part.format(folder=folder) for part in self.run]


PROTOC = "protoc --descriptor_set_in=triton.protoset grpc_service.proto model_config.proto"
GO_NAMES = "Mgrpc_service.proto=triton/inference,Mmodel_config.proto=triton/inference"
LANGUAGES = {
    "Go": Language(
        "golang-go golang-google-grpc-dev protoc-gen-go-1-5 protoc-gen-go-grpc",
        ("/usr/bin/protoc-gen-go-grpc", "/usr/share/gocode/src/google.golang.org/protobuf"),
        f"""
        {PROTOC} --go_out=out --go_opt={GO_NAMES} --go-grpc_out=out --go-grpc_opt={GO_NAMES}
        mkdir src && mv out/triton src
        export GO111MODULE=off GOCACHE=$PWD/cache GOPATH=$PWD:/usr/share/gocode
        go build -o client {{program}}
        """,
        ("{folder}/client",),
    ),
    "C++": Language(
        "g++ pkg-config libgrpc++-dev protobuf-compiler-grpc",
        ("/usr/include/grpcpp/grpcpp.h", "/usr/bin/grpc_cpp_plugin"),
        f"""
        {PROTOC} --cpp_out=out --grpc_out=out --plugin=protoc-gen-grpc=/usr/bin/grpc_cpp_plugin
        g++ -Iout {{program}} out/*.cc -o client $(pkg-config --libs grpc++ protobuf)
        """,
        ("{folder}/client",),
    ),
    "Java": Language(
        "default-jdk-headless protobuf-compiler-grpc-java-plugin libgrpc-java libnetty-java",
        (f"{JARS}/grpc-netty.jar", f"{JARS}/netty-all.jar", JAVA_PLUGIN),
        f"""
        {PROTOC} --java_out=out --grpc-java_out=out --plugin=protoc-gen-grpc-java={JAVA_PLUGIN}
        javac -nowarn -cp "out:{JARS}/*" -d out {{program}} out/inference/*.java
        """,
        ("java", "-cp", f"{{folder}}/out:{JARS}/*", "Client"),
    ),
}

"""The command line: its forms, every flag, every error, and flags that are not supported yet."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from host import lane
from host.inference.metadata import ServerMetadata
from host.options import validators
from host.options.command_line import DEPRECATED, parse, usage
from host.options.flags import Flag, Status
from host.options.options import Options, UsageError, option_table_rows
from host.options.server_flags import FLAGS
from tests import flag_table

HERE = os.path.dirname(__file__)


def options(*argv: str) -> Options:
    """With a model repository that exists, and without deprecation warnings to care about."""
    return parse(["--model-repository", HERE, *argv])


def complaint(*argv: str) -> str:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert str(caught.value).startswith("Usage: pbhost serve [options]; `pbhost serve --help`")
    told = caught.value.detail + "\n" + caught.value.advice if caught.value.advice else ""
    assert str(caught.value).endswith(told or caught.value.detail)
    return caught.value.detail


def advice(*argv: str, lines: int = 1) -> str:
    """The last lines of the error for an invalid command line."""
    with pytest.raises(UsageError) as caught:
        parse(argv)
    return "\n".join(str(caught.value).splitlines()[-lines:])


def bad(flag: str, text: str) -> str:
    """The complaint about one flag's value, without its first line, which is checked."""
    first, _, detail = complaint("--model-repository", HERE, f"--{flag}={text}").partition("\n")
    assert first == f'Bad option: "--{flag}".'
    return detail


# Forms


def test_the_defaults_are_those_of_triton() -> None:
    made = options()
    assert made == Options(model_repository=[HERE])
    assert made.warnings == []
    assert (made.id, made.grpc_port, made.allow_grpc) == ("triton", 8001, True)
    assert (made.exit_timeout_secs, made.model_load_thread_count) == (30, 4)
    assert (made.model_control_mode, made.repository_poll_secs) == ("none", 0)
    assert (made.log_format, made.log_verbose, made.log_info) == ("default", 0, True)
    assert (made.strict_readiness, made.exit_on_error) == (True, True)
    assert not made.disable_auto_complete_config


@given(st.text(max_size=8), st.booleans())
def test_value_follows_after_an_equals_sign_or_as_the_next_argument(value: str, one: bool) -> None:
    argv = [f"--id={value}"] if one else ["--id", value]
    assert options(*argv).id == value


def test_value_may_look_like_a_flag_after_an_equals_sign() -> None:
    assert options("--id=--grpc-port").id == "--grpc-port"
    assert options("--id", "--no-flag").id == "--no-flag"


@given(st.integers(9000, 65535), st.integers(0, 3), st.sampled_from(["", "+", " ", "000"]))
def test_unique_prefix_is_enough(port: int, cut: int, lead: str) -> None:
    flag = "--grpc-port"
    assert options(f"{flag[: len(flag) - cut]}={lead}{port}").grpc_port == port


def test_whole_name_wins_over_longer_ones() -> None:
    assert options("--grpc-use-ssl=1").grpc_use_ssl
    assert options("--grpc-keepalive-time=5").grpc_keepalive_time == 5


def test_ambiguous_prefix_is_refused() -> None:
    assert complaint("--log-v=1", "--log-f=x") == (
        "option '--log-f' is ambiguous; possibilities: '--log-format' '--log-file'"
    )


def test_last_value_counts() -> None:
    assert options("--grpc-port=1", "--grpc-port=2").grpc_port == 2


@given(st.sampled_from(["true", "on", "1"]), st.sampled_from(["false", "off", "0"]), st.data())
def test_booleans_may_be_written_in_any_case(yes: str, no: str, data: st.DataObject) -> None:
    def cased(word: str) -> str:
        return data.draw(st.sampled_from([word, word.upper(), word.capitalize()]))

    assert options(f"--allow-grpc={cased(no)}", f"--reuse-grpc-port={cased(yes)}") == Options(
        model_repository=[HERE], allow_grpc=False, reuse_grpc_port=True
    )


@pytest.mark.parametrize(("text", "level"), [("true", 1), ("FALSE", 0), ("3", 3), ("-2", 0)])
def test_verbose_takes_numbers_and_booleans(text: str, level: int) -> None:
    assert options(f"--log-verbose={text}").log_verbose == level


def test_model_store_is_model_repository(tmp_path: Path) -> None:
    made = parse([f"--model-store={tmp_path}", "--model-repository", HERE])
    assert made.model_repository == [str(tmp_path), HERE]


def test_a_flag_without_value_takes_none() -> None:
    assert options("--disable-auto-complete-config").disable_auto_complete_config
    assert complaint("--disable-auto-complete-config=true") == (
        "option '--disable-auto-complete-config' doesn't allow an argument"
    )


def test_missing_value_is_refused() -> None:
    assert complaint("--grpc-port") == "option '--grpc-port' requires an argument"


def test_unknown_flag_is_refused_with_a_suggestion() -> None:
    assert complaint("--grcp-port=1") == (
        "unrecognized option '--grcp-port', did you mean '--grpc-port'?"
    )
    assert complaint("--grpc_port=1").endswith(", did you mean '--grpc-port'?")
    assert complaint("--qqqq") == "unrecognized option '--qqqq'"
    assert complaint("-x") == "unrecognized option '-x'"
    assert complaint("--=x") == "unrecognized option '--'"


def test_positional_arguments_are_repositories(tmp_path: Path) -> None:
    options = parse([str(tmp_path), "--id=x", f"--model-repository={HERE}"])
    assert options.model_repository == [HERE, str(tmp_path)]
    assert advice("nowhere") == "'nowhere' does not exist"
    assert complaint("nowhere") == "repository path is not a valid directory"
    assert complaint("models", "--grpc-port=x").startswith('Bad option: "--grpc-port".')


def test_the_error_for_an_invalid_value_says_what_the_flag_takes() -> None:
    flags = ("--model-repository", HERE)
    assert advice(*flags, "--http-port=80x") == (
        "--http-port <integer>: Port to listen on; 0 selects a free port. Default: 8000."
    )
    assert advice(*flags, "--log-format=iso8601", lines=2) == (
        "got 'iso8601', did you mean 'ISO8601'?\n"
        "--log-format <string>: Format of log lines: default, ISO8601, or json (one JSON object per"
        " line). Default: default."
    )
    assert "health, metadata, inference," in advice(*flags, "--http-restricted-api=wealth:k=v")
    assert advice(*flags, "--grpc-port").startswith("--grpc-port <integer>: Port to listen on")
    assert advice(*flags, "--trace-rate=x").startswith("--trace-rate <integer>: Please use")
    assert advice(*flags, "--allow-vertex-ai=true").endswith("platforms are not implemented")


def test_a_repository_that_is_none_is_named(tmp_path: Path) -> None:
    assert advice(f"--model-repository={tmp_path}/a") == f"'{tmp_path}/a' does not exist"
    assert advice("--model-repository", __file__) == f"'{__file__}' is a file"


def test_the_folder_of_a_model_in_place_of_a_repository_is_a_warning(tmp_path: Path) -> None:
    (tmp_path / "m").mkdir()
    (tmp_path / "m" / "config.pbtxt").touch()
    assert parse([f"--model-repository={tmp_path}"]).warnings == []
    assert parse([f"--model-repository={tmp_path}/m"]).warnings == [
        (
            f"--model-repository: '{tmp_path}/m' contains a config.pbtxt, so it is probably a model"
            f" directory; its repository is '{tmp_path}'"
        )
    ]


@pytest.mark.parametrize("argv", [["--help"], ["-h"], ["--grpc-port=1", "--hel"]])
def test_help_is_the_usage_and_no_complaint(argv: list[str]) -> None:
    with pytest.raises(UsageError) as caught:
        parse(argv)
    assert str(caught.value) == usage()
    assert caught.value.detail == ""


def test_usage_names_every_flag_and_says_what_has_no_effect() -> None:
    text = usage()
    for name in [flag.name for flag in FLAGS] + [alias.name for alias in DEPRECATED]:
        assert f"  --{name}" in text
    assert "  --model-store <string>\n\tEquivalent to --model-repository." in text
    assert "  --disable-auto-complete-config\n" in text
    assert "Logging:\n  --log-verbose <integer>\n\tLevel of verbose log lines; 0" in text
    assert (
        "\tSeconds that the server waits at exit for requests in flight. Default:\n\t30.\n" in text
    )
    assert "\tExit if a model fails to load at start-up. Default: true.\n" in text
    assert "\tAppend the log to this file instead of writing it to the console.\n" in text
    assert (
        "\tEnable GPU peer access. Accepted without effect: the server process\n"
        "\tdoes not use GPUs.\n"
    ) in text
    assert "Stub Processes:\n  --arena-byte-size <bytes>" in text
    assert "DEPRECATED:\n  --strict-model-config <boolean>\n\tDEPRECATED: Please use" in text


def test_every_flag_is_a_field_with_the_same_default() -> None:
    defaults = Options()
    for flag in FLAGS:
        if flag.field != "repository_poll_secs":
            assert getattr(defaults, flag.field) == flag.default
    assert {flag.field for flag in FLAGS} | {"warnings"} == {
        field.name for field in dataclasses.fields(Options)
    }


def test_options_do_not_share_lists() -> None:
    one, two = Options(), Options()
    one.load_model.append("m")
    one.backend_config["python"] = {}
    assert two.load_model == []
    assert two.backend_config == {}


# Complaints


@pytest.mark.parametrize(
    ("flag", "text", "detail"),
    [
        ("log-info", "maybe", "invalid value for bool option: maybe"),
        ("grpc-port", "abc", "Invalid option value. Got abc"),
        ("grpc-port", "", "Invalid option value. Got "),
        ("grpc-port", "4x", "Invalid option value. Got 4x"),
        ("grpc-port", "1_0", "Invalid option value. Got 1_0"),
        ("grpc-port", "٣", "Invalid option value. Got ٣"),
        ("grpc-port", "65536", "Provided option value is out of bound. Got 65536"),
        ("grpc-port", "-1", "Provided option value is out of bound. Got -1"),
        (
            "exit-timeout-secs",
            "2147483648",
            "Provided option value is out of bound. Got 2147483648",
        ),
        (
            "exit-timeout-secs",
            "9" * 5000,
            f"Provided option value is out of bound. Got {'9' * 5000}",
        ),
        ("stub-grace-secs", "soon", "Invalid option value. Got soon"),
        ("stub-grace-secs", "nan", "Invalid option value. Got nan"),
        ("stub-grace-secs", "1e999", "Provided option value is out of bound. Got 1e999"),
        ("stub-grace-secs", "-1", "Provided option value is out of bound. Got -1.0"),
        ("log-verbose", "much", "Invalid option value. Got much"),
        ("log-format", "xml", "invalid argument for --log-format"),
        ("model-control-mode", "auto", "invalid argument for --model-control-mode"),
        ("rate-limit", "on", "invalid argument for --rate-limit"),
        (
            "grpc-infer-response-compression-level",
            "max",
            "invalid argument for --grpc_infer_response_compression_level",
        ),
        (
            "grpc-infer-thread-count",
            "1",
            "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128.",
        ),
        (
            "grpc-infer-thread-count",
            "129",
            "invalid argument for --grpc_infer_thread_count. Must be in the range 2 to 128.",
        ),
        (
            "grpc-max-response-pool-size",
            "0",
            "Error: --grpc-max-response-pool-size must be greater than 0.",
        ),
        ("http-max-input-size", "0", "Error: --http-max-input-size must be greater than 0."),
        (
            "metrics-config",
            "a,b=c",
            "--metrics-config option format is <setting>=<value>. Got a,b=c",
        ),
        (
            "cache-config",
            "local",
            "--cache-config option format is '<cache name>,<setting>=<value>'. Got local",
        ),
        (
            "cache-config",
            "size=1",
            (
                "No cache specified. --cache-config option format is"
                " '<cache name>,<setting>=<value>'. Got size=1"
            ),
        ),
        (
            "backend-config",
            "python",
            "--backend-config option format is '<backend name>,<setting>=<value>'. Got python",
        ),
        (
            "backend-config",
            "python,k=",
            "--backend-config option format is '<backend name>,<setting>=<value>'. Got python,k=",
        ),
        (
            "rate-limit-resource",
            "R1",
            (
                "--rate-limit-resource option format is '<resource_name>:<count>:<device>' or"
                " '<resource_name>:<count>'. Got R1"
            ),
        ),
        (
            "http-restricted-api",
            "health=k",
            (
                "--http-restricted-api option format is '<config name>:<setting>=<value>'."
                " Got health=k"
            ),
        ),
        (
            "grpc-restricted-protocol",
            "health:k",
            (
                "--grpc-restricted-protocol option format is '<config name>:<setting>=<value>'."
                " Got health:k"
            ),
        ),
        ("http-restricted-api", "wealth:k=v", "unknown restricted api 'wealth' "),
        ("grpc-restricted-protocol", "health,:k=v", "unknown restricted protocol '' "),
        (
            "http-restricted-api",
            "health:=v",
            (
                "--http-restricted-api option format is '<config name>:<setting>=<value>'."
                " Got health:=v"
            ),
        ),
        (
            "grpc-header-forward-pattern",
            "(x",
            ("invalid regular expression: missing ): (?i)(x. Got (x; the syntax is that of RE2"),
        ),
        (
            "http-header-forward-pattern",
            "(x{1000}){1000}",
            (
                "invalid regular expression: invalid repetition size: {1000}."
                " Got (x{1000}){1000}; the syntax is that of RE2"
            ),
        ),
        ("grpc-restricted-protocol", "wealth:k=v", "unknown restricted protocol 'wealth' "),
        (
            "host-policy",
            "p,colour=red",
            (
                "Unsupported host policy setting 'colour' is specified, supported settings are"
                " 'numa-node', 'cpu-cores'"
            ),
        ),
        (
            "host-policy",
            "numa-node=1",
            "--host-policy option format is '<policy name>,<setting>=<value>'. Got numa-node=1",
        ),
        *[
            (
                "host-policy",
                f"p,cpu-cores={cores}",
                (
                    "host policy setting 'cpu-cores' format is"
                    f" '<lower_cpu_core_id>-<upper_cpu_core_id>'. Got {wrong}"
                ),
            )
            for cores, wrong in [("a", "a"), ("3-1", "3-1"), ("0-1,", ""), ("0,-2", "-2")]
        ],
        (
            "host-policy",
            "p,numa-node=-1",
            "host policy setting 'numa-node' must be the number of a NUMA node. Got -1",
        ),
        ("trace-config", "level=LOUD", "invalid value for trace level option: LOUD"),
        (
            "trace-config",
            "mode=jaeger",
            (
                'invalid value for trace mode option: jaeger. Available options are "triton" and'
                ' "opentelemetry"'
            ),
        ),
        (
            "trace-config",
            "jaeger,url=x",
            (
                'invalid value for trace mode option: jaeger. Available options are "triton" and'
                ' "opentelemetry"'
            ),
        ),
        (
            "trace-config",
            "rate",
            "--trace-config option format is '<mode>,<setting>=<value>'. Got rate",
        ),
        (
            "cuda-memory-pool-byte-size",
            "0",
            "--cuda-memory-pool-byte-size option format is '<device>:<bytes>'. Got 0",
        ),
        (
            "memory-budget",
            "8GB",
            (
                "--memory-budget option format is '<bytes>' or '<device>:<bytes>', with bytes as in"
                " 8589934592, 700M or 8Gi. Got 8GB"
            ),
        ),
        ("memory-budget", "1:0", "--memory-budget got 0 bytes: 1:0"),
        (
            "cuda-virtual-address-size",
            "0:x",
            "--cuda-virtual-address-size option format is '<device>:<bytes>'. Got 0:x",
        ),
        (
            "model-load-gpu-limit",
            "0",
            "--model-load-gpu-limit option format is '<device>:<fraction>'. Got 0",
        ),
        ("model-load-gpu-limit", "-1:0.6", "expects device ID >= 0, got -1"),
        (
            "model-load-gpu-limit",
            "0:-0.4",
            "expects limit fraction to be in range [0.0, 1.0], got -0.400000",
        ),
        (
            "model-load-gpu-limit",
            "0:2",
            "expects limit fraction to be in range [0.0, 1.0], got 2.000000",
        ),
    ],
)
def test_invalid_values_are_refused(flag: str, text: str, detail: str) -> None:
    assert bad(flag, text) == detail


def test_complaints_hold_for_options_made_in_a_program_too() -> None:
    with pytest.raises(UsageError) as caught:
        Options(log_format="xml")
    assert str(caught.value).splitlines()[:2] == [
        'Bad option: "--log-format".',
        "invalid argument for --log-format",
    ]


@pytest.mark.parametrize(
    ("argv", "detail"),
    [
        ([], "--model-repository must be specified"),
        (["--model-repository", f"{HERE}/none"], "repository path is not a valid directory"),
        (["--model-repository", __file__], "repository path is not a valid directory"),
        (
            ["--model-repository", HERE, "--load-model=m"],
            (
                "Error: Use of '--load-model' requires setting '--model-control-mode=explicit' as"
                " well."
            ),
        ),
        (
            [
                *("--model-repository", HERE, "--model-control-mode=explicit"),
                *("--load-model=*", "--load-model=m"),
            ],
            "Wildcard model name '*' must be the ONLY startup model if specified at all.",
        ),
        (
            ["--model-repository", HERE, "--model-config-name="],
            "Error: empty argument for --model-config-name",
        ),
        (
            [
                *("--model-repository", HERE, "--cache-config=local,size=1"),
                "--response-cache-byte-size=1",
            ],
            (
                "Error: Incompatible flags --response-cache-byte-size and --cache-config both"
                " provided. Please provide one or the other."
            ),
        ),
        (
            ["--model-repository", HERE, "--http-port=8001"],
            (
                "The server cannot listen to HTTP requests and GRPC requests at the same address"
                " and port 0.0.0.0:8001"
            ),
        ),
        (
            ["--model-repository", HERE, "--metrics-port=8001"],
            (
                "The server cannot listen to GRPC requests and metrics requests at the same address"
                " and port 0.0.0.0:8001"
            ),
        ),
        (
            [
                *("--model-repository", HERE, "--http-address=::1"),
                *("--http-port=7000", "--metrics-port=7000"),
            ],
            (
                "The server cannot listen to HTTP requests and metrics requests at the same address"
                " and port ::1:7000"
            ),
        ),
        (
            [
                *("--model-repository", HERE, "--http-restricted-api=health,trace:k=v"),
                "--http-restricted-api=trace:k=w",
            ],
            (
                'Bad option: "--http-restricted-api".\n'
                "restricted api 'trace' can not be specified in multiple config groups"
            ),
        ),
        (
            [
                *("--model-repository", HERE, "--grpc-restricted-protocol=health:k=v"),
                "--grpc-restricted-protocol=health:k=w",
            ],
            (
                'Bad option: "--grpc-restricted-protocol".\n'
                "restricted protocol 'health' can not be specified in multiple config groups"
            ),
        ),
        (
            [
                *("--model-repository", HERE, "--cache-config=local,size=1"),
                "--cache-config=redis,host=x",
            ],
            (
                'Bad option: "--cache-config".\nfound multiple cache configurations, but only a'
                " single cache is currently supported"
            ),
        ),
    ],
)
def test_options_that_do_not_go_together(argv: list[str], detail: str) -> None:
    assert complaint(*argv) == detail


@pytest.mark.parametrize(
    "argv",
    [
        ["--http-port=8001", "--allow-http=false"],
        ["--http-port=8001", "--grpc-address=127.0.0.1"],
        ["--http-port=0", "--grpc-port=0", "--metrics-port=0"],
    ],
)
def test_ports_that_do_not_clash(argv: list[str]) -> None:
    options(*argv)


# Meaning


def test_numbers_are_kept_in_bounds() -> None:
    made = options("--exit-timeout-secs=-5", "--model-load-thread-count=0")
    assert (made.exit_timeout_secs, made.model_load_thread_count) == (0, 1)


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("model-control-mode", "EXPLICIT"),
        ("model-control-mode", "Poll"),
        ("rate-limit", "Execution_Count"),
        ("grpc-infer-response-compression-level", "HIGH"),
    ],
)
def test_words_that_triton_reads_in_any_case(flag: str, text: str) -> None:
    assert getattr(options(f"--{flag}={text}"), flag.replace("-", "_")) == text.lower()


def test_log_format_is_read_as_it_is_written() -> None:
    with pytest.raises(UsageError, match="invalid argument for --log-format"):
        options("--log-format=iso8601")


def test_models_of_the_start_are_listed_in_explicit_mode() -> None:
    made = options("--model-control-mode=explicit", "--load-model=a", "--load-model", "b")
    assert made.load_model == ["a", "b"]


def test_one_path_will_do_as_model_repository(tmp_path: Path) -> None:
    assert Options(model_repository="models").model_repository == ["models"]
    assert Options(model_repository=tmp_path).model_repository == [tmp_path]  # type: ignore[arg-type]  # one path, not a list


def test_arena_limit_is_the_machines_memory_if_none_is_given() -> None:
    assert options("--arena-byte-size=5000000000").arena_limit == 5_000_000_000
    assert options().arena_limit == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_the_grace_of_stubs_may_be_a_fraction_of_a_second() -> None:
    assert options().stub_grace_secs == 10.0
    assert options("--stub-grace-secs=.5").stub_grace_secs == 0.5


# Settings of backends


def test_backend_settings_are_kept_by_backend() -> None:
    made = options(
        "--backend-config=python,shm-default-byte-size=2097152",
        "--backend-config=python,thread-pool-size=4",
        "--backend-config=onnxruntime,a=b=c",
        "--backend-config=default-max-batch-size=8",
    )
    assert made.backend_config == {
        "python": {"shm-default-byte-size": "2097152", "thread-pool-size": "4"},
        "onnxruntime": {"a": "b=c"},
        "": {"default-max-batch-size": "8"},
    }
    assert made.warnings == [
        "--backend-config: setting 'a' of backend 'onnxruntime' is not used by this version",
    ]


def test_settings_that_the_tensorrt_backend_reads_cause_no_warning() -> None:
    made = options(
        "--backend-config=tensorrt,plugins=/a.so;/b.so",
        "--backend-config=tensorrt,version-compatible=true",
        "--backend-config=tensorrt,colour=red",
    )
    assert made.warnings == [
        "--backend-config: setting 'colour' of backend 'tensorrt' is not used by this version"
    ]


def test_every_setting_of_the_python_backend_is_accepted_without_a_warning() -> None:
    made = options(
        "--backend-config=python,shm-default-byte-size=1048576",
        "--backend-config=python,shm-growth-byte-size=1",
        "--backend-config=python,shm-region-prefix-name=p",
        "--backend-config=python,thread-pool-size=1",
        "--backend-config=python,stub-timeout-seconds=1",
        "--backend-config=python,shm_message_queue_size=7",
    )
    assert made.warnings == []


@pytest.mark.parametrize(
    ("key", "value", "detail"),
    [
        ("shm-default-byte-size", "1048575", "shm-default-byte-size can't be smaller than 4 MiBs"),
        (
            "shm-growth-byte-size",
            "0",
            "shm-growth-byte-size can't be smaller than or equal to zero.",
        ),
        (
            "shm-region-prefix-name",
            "",
            "shm-region-prefix-name must at least contain one character.",
        ),
        ("thread-pool-size", "0", "thread-pool-size can't be less than 1."),
        (
            "stub-timeout-seconds",
            "0",
            "stub-timeout-seconds can't be smaller than or equal to zero.",
        ),
        ("thread-pool-size", "many", "stol"),
        ("shm-growth-byte-size", "9" * 30, "stol"),
    ],
)
def test_invalid_python_settings_are_refused(key: str, value: str, detail: str) -> None:
    with pytest.raises(UsageError) as caught:
        Options(backend_config={"python": {key: value}})
    assert caught.value.detail == f'Bad option: "--backend-config".\n{detail}'
    if value:
        assert bad("backend-config", f"python,{key}={value}") == detail


# Flags that are not supported yet


SAMPLES = {
    "allow-sagemaker": "true",
    "sagemaker-safe-port-range": "1-2",
    "allow-vertex-ai": "true",
    "vertex-ai-default-model": "m",
}


def test_samples_cover_every_refused_flag() -> None:
    assert set(SAMPLES) == {flag.name for flag in FLAGS if flag.status is Status.REFUSED}


@pytest.mark.parametrize("flag", SAMPLES)
def test_flag_that_would_do_nothing_is_refused_with_a_reason(flag: str) -> None:
    (reason,) = [known.reason for known in FLAGS if known.name == flag]
    assert reason
    assert bad(flag, SAMPLES[flag]) == f"--{flag} is not supported by this version: {reason}"


@pytest.mark.parametrize("flag", [f for f in FLAGS if f.status is not Status.HONOURED])
def test_flag_that_is_not_honoured_says_why_in_the_usage(flag: Flag) -> None:
    assert flag.reason
    assert not flag.reason.endswith(".")
    shown = " ".join(usage().split(f"  --{flag.name} <")[1].split("\n  --")[0].split())
    assert f"{flag.status.value}: {flag.reason}." in shown


@pytest.mark.parametrize(
    "flag", [f for f in FLAGS if f.status is Status.REFUSED and not isinstance(f.default, list)]
)
def test_refused_flag_may_say_its_default(flag: Flag) -> None:
    if flag.default != "":
        options(f"--{flag.name}={flag.default}")


def test_every_flag_of_triton_is_known() -> None:
    assert flag_table.TRITONS <= {flag.name for flag in FLAGS}


def test_the_operators_page_says_what_becomes_of_every_flag() -> None:
    assert flag_table.written().strip() == flag_table.section().strip(), (
        "docs/reference/flags.md is behind the options; run: python -m tests.flag_table"
    )


def test_polls_have_an_interval() -> None:
    assert options("--model-control-mode=poll").repository_poll_secs == 15
    made = options("--model-control-mode=poll", "--repository-poll-secs=3")
    assert made.repository_poll_secs == 3
    for never in ("0", "-1"):
        made = options("--model-control-mode=poll", f"--repository-poll-secs={never}")
        assert (made.model_control_mode, made.repository_poll_secs) == ("poll", 0)


def test_poll_interval_has_no_effect_in_other_modes() -> None:
    assert options("--repository-poll-secs=60").repository_poll_secs == 0


@pytest.mark.parametrize(
    "argv",
    [
        ["--allow-http=false"],
        ["--http-port=8000"],
        ["--http-thread-count", "9", "--http-restricted-api=health:k=v"],
    ],
)
def test_options_of_http_are_served(argv: list[str]) -> None:
    assert options(*argv).warnings == []


def test_metrics_settings_are_read_and_complained_about() -> None:
    made = options(
        "--metrics-config=summary_latencies=true",
        "--metrics-config=summary_quantiles=0.5:0.05,0.9:0.01",
        "--metrics-config=volume=11",
    )
    assert made.metrics_settings.summary_latencies
    assert made.metrics_settings.quantiles == (0.5, 0.9)
    assert made.warnings == ["--metrics-config: setting 'volume' is not used by this version"]


def test_metrics_are_where_http_is_unless_told_otherwise() -> None:
    assert options("--http-address=127.0.0.1").metrics_host == "127.0.0.1"
    assert options("--metrics-address=127.0.0.2").metrics_host == "127.0.0.2"


@pytest.mark.parametrize(
    ("flag", "text"),
    [
        ("enable-peer-access", "false"),
        ("pinned-memory-pool-byte-size", "0"),
        ("cuda-memory-pool-byte-size", "0:67108864"),
        ("cuda-virtual-address-size", "0:1"),
        ("min-supported-compute-capability", "7.5"),
        ("model-load-gpu-limit", "0:0.5"),
        ("buffer-manager-thread-count", "2"),
        ("grpc-infer-thread-count", "8"),
        ("grpc-infer-allocation-pool-size", "100"),
        ("sagemaker-port", "8080"),
        ("vertex-ai-thread-count", "1"),
    ],
)
def test_tuning_flags_are_accepted(flag: str, text: str) -> None:
    assert options(f"--{flag}={text}").warnings == []


# Deprecated


@pytest.mark.parametrize(
    ("flag", "text", "field", "value", "instead"),
    [
        (
            *("strict-model-config", "true", "disable_auto_complete_config", True),
            "'--disable-auto-complete-config' instead.",
        ),
        (
            *("strict-model-config", "false", "disable_auto_complete_config", False),
            "'--disable-auto-complete-config' instead.",
        ),
        (
            *("response-cache-byte-size", "0", "cache_config", []),
            "--cache-config local,size=<bytes> instead.",
        ),
        (
            *("trace-file", "/t", "trace_config", ["triton,file=/t"]),
            "--trace-config triton,file=<value>.",
        ),
        ("trace-level", "OFF", "trace_config", ["level=OFF"], "--trace-config level=<value>."),
        ("trace-rate", "5", "trace_config", ["rate=5"], "--trace-config rate=<value>."),
        ("trace-count", "-1", "trace_config", ["count=-1"], "--trace-config count=<value>."),
        (
            *("trace-log-frequency", "9", "trace_config", ["triton,log-frequency=9"]),
            "--trace-config triton,log-frequency=<value>.",
        ),
        ("stay-awake", "false", "busy_poll", False, "--busy-poll instead."),
    ],
)
def test_deprecated_flag_stands_for_another(
    flag: str, text: str, field: str, value: object, instead: str
) -> None:
    made = options(f"--{flag}={text}")
    assert getattr(made, field) == value
    assert made.warnings == [f"Warning: '--{flag}' has been deprecated! Please use {instead}"]


def test_strict_model_config_that_is_overridden_is_a_second_warning() -> None:
    made = options("--strict-model-config=false", "--disable-auto-complete-config")
    assert made.disable_auto_complete_config
    assert made.warnings == [
        (
            "Warning: '--strict-model-config' has been deprecated! Please use"
            " '--disable-auto-complete-config' instead."
        ),
        (
            "Warning: Overriding deprecated '--strict-model-config' from False to True in favor of"
            " '--disable-auto-complete-config'!"
        ),
    ]
    assert (
        len(options("--strict-model-config=true", "--disable-auto-complete-config").warnings) == 1
    )


def test_complaint_about_a_deprecated_flags_value_names_it() -> None:
    assert bad("trace-rate", "often") == "Invalid option value. Got often"


def test_deprecated_flag_is_refused_like_the_one_it_stands_for() -> None:
    argv = "--trace-level=LOUD"
    detail = "invalid value for trace level option: LOUD"
    assert detail in complaint("--model-repository", HERE, argv)


def test_a_resource_has_a_name_a_count_and_perhaps_a_device() -> None:
    made = options("--rate-limit-resource=R:4", "--rate-limit-resource=S:2:1")
    assert made.rate_limiter_resources == [("R", 4, None), ("S", 2, 1)]


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("+700000", 700_000),
        ("700k", 700_000),
        ("700K", 700_000),
        ("700M", 700_000_000),
        ("7G", 7_000_000_000),
        ("1T", 1_000_000_000_000),
        ("1Ki", 1024),
        ("700Mi", 700 << 20),
        ("8Gi", 8 << 30),
        ("1Ti", 1 << 40),
    ],
)
def test_a_size_in_bytes_may_have_a_suffix(text: str, size: int) -> None:
    assert options(f"--arena-byte-size={text}").arena_limit == size
    assert options(f"--http-max-input-size={text}").http_max_input_size == size
    assert options(f"--response-cache-byte-size={text}").cache_settings == (
        "local",
        {"size": str(size)},
    )


@pytest.mark.parametrize(
    "text",
    ["M", "7MB", "7 M", "7mi", "-7M", "7.5G", "0x7", "\N{DIGIT SEVEN}\N{ARABIC-INDIC DIGIT SEVEN}"],
)
def test_other_texts_are_no_sizes(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        options(f"--arena-byte-size={text}")
    assert f"Invalid option value. Got {text}" in str(caught.value)
    assert "a number, perhaps with K, M, G, T, Ki, Mi, Gi or Ti" in caught.value.advice


@pytest.mark.parametrize(
    "flag",
    ["receive-buffer-byte-size=", "response-cache-byte-size=", "memory-budget=", "memory-budget=0:",
     "cuda-memory-pool-byte-size=0:"],
)  # fmt: skip
def test_a_size_has_at_most_63_bits(flag: str) -> None:
    options(f"--{flag}9223372036854775807")
    options(f"--{flag}9007199254740991Ki")
    for text in ("9223372036854775808", "9007199254740992Ki", "9" * 18 + "T", "9" * 5000 + "M"):
        detail = complaint("--model-repository", HERE, f"--{flag}{text}")
        assert "out of bound. Got" in detail


def test_an_arena_has_at_most_one_exbibyte() -> None:
    assert options("--arena-byte-size=1152921504606846976").arena_limit == 1 << 60
    for text in ("1152921504606846977", "9223372036854775807"):
        with pytest.raises(UsageError) as caught:
            options(f"--arena-byte-size={text}")
        assert '"--arena-byte-size"' in str(caught.value)
        assert f"out of bound. Got {text}" in str(caught.value)
        assert "at most 1152921504606846976 bytes" in caught.value.advice
    with pytest.raises(UsageError, match="out of bound"):
        Options(model_repository=[HERE], arena_byte_size=1 << 61)


def test_a_memory_budget_is_of_the_host_and_of_gpus() -> None:
    made = options("--memory-budget=1000", "--memory-budget=0:7", "--memory-budget=1:8")
    assert validators.memory_budget(made.memory_budget) == {None: 1000, 0: 7, 1: 8}
    made = options("--memory-budget=700M", "--memory-budget=0:8Gi")
    assert validators.memory_budget(made.memory_budget) == {None: 700_000_000, 0: 8 << 30}
    with pytest.raises(UsageError, match="a second value for the same memory: 0:2"):
        options("--memory-budget=0:1", "--memory-budget=0:2")
    with pytest.raises(UsageError, match="does not work with --model-namespacing"):
        options("--memory-budget=1000", "--model-namespacing=true")


def test_a_cache_has_a_name_and_settings() -> None:
    assert options().cache_settings is None
    made = options("--cache-config=redis,host=h", "--cache-config=redis,port=1")
    assert made.cache_settings == ("redis", {"host": "h", "port": "1"})
    assert options("--response-cache-byte-size=9").cache_settings == ("local", {"size": "9"})


SERVER = ServerMetadata("me", "2.73.0", ["a", "b"])


def test_every_row_of_triton_is_there(tmp_path: Path) -> None:
    options = parse(
        [
            f"--model-repository={tmp_path}",
            "--model-control-mode=explicit",
            "--load-model=x",
            "--load-model=y",
            "--model-config-name=fast",
            "--rate-limit=execution_count",
            "--rate-limit-resource=R1:4",
            "--rate-limit-resource=R2:3:1",
            "--cuda-memory-pool-byte-size=0:1024",
            "--cache-config=local,size=1048576",
        ]
    )
    assert option_table_rows(SERVER, options) == [
        ["server_id", "me"],
        ["server_version", "2.73.0"],
        ["server_extensions", "a b"],
        ["model_repository_path[0]", str(tmp_path)],
        ["model_control_mode", "MODE_EXPLICIT"],
        ["startup_models_0", "x"],
        ["startup_models_1", "y"],
        ["strict_model_config", "0"],
        ["model_config_name", "fast"],
        ["rate_limit", "EXEC_COUNT"],
        ["rate_limit_resource[0]", '{"name":"R1", "count":4 "device":-1}'],
        ["rate_limit_resource[1]", '{"name":"R2", "count":3 "device":1}'],
        ["pinned_memory_pool_byte_size", "268435456"],
        ["cuda_memory_pool_byte_size{0}", "1024"],
        ["min_supported_compute_capability", "6.0"],
        ["strict_readiness", "1"],
        ["exit_timeout", "30"],
        ["cache_enabled", "1"],
        ["compiled_lane", lane.state],
    ]


def test_unset_options_are_listed_too(tmp_path: Path) -> None:
    rows = dict(option_table_rows(SERVER, parse([f"--model-repository={tmp_path}"])))
    assert (rows["model_control_mode"], rows["model_config_name"]) == ("MODE_NONE", "")
    assert (rows["rate_limit"], rows["cache_enabled"]) == ("OFF", "0")

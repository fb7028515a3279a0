//! `fake-nvml COMMAND ROOT …`: makes something happen to the hardware of a fake-GPU node.

use std::path::PathBuf;
use std::process::ExitCode;
use std::time::Duration;

use fake_nvml::control::{Hardware, Instance, KillAt, RowRemap, Slowdown};

const HELP: &str = "\
usage: fake-nvml COMMAND ROOT [OPTION…]

Makes something happen to the hardware of the fake-GPU node in ROOT, a driver root made by
fake-gpu-node (its topology.yaml and state.json). Every process that has the library loaded
sees it at its next call.

  xid ROOT GPU XID [--instance GI[:CI]]
        a critical error: an event for those who wait for one now
  ecc ROOT GPU [--count N] [--corrected]
        N (1) uncorrectable ECC errors: counted, and one event
  row-remap ROOT GPU [--correctable N] [--uncorrectable N] [--pending] [--failed]
        remapped rows: counts are added, flags set
  thermal ROOT GPU [--celsius N] [--hw] [--sw] [--power-brake]
        the temperature, and why clocks are lowered; without an option: idle again
  action ROOT GPU ACTION
        what the driver asks for: none, gpu-reset, node-reboot, drain-p2p, drain-and-reset
  lost ROOT GPU
        the GPU falls off the bus
  recover ROOT GPU
        a reset: ends loss, errors, heat, processes and MIG instances
  process ROOT GPU PID [--instance GI:CI] [--memory MIB] [--end]
        a process computes there, or ends
  fail ROOT FUNCTION CODE [--gpu GPU]
        a function of nvml.h answers with CODE (0: acts again) instead of acting
  delay ROOT FUNCTION SECONDS [--gpu GPU]
        a function hangs so long before it acts (0: no longer)
  kill ROOT FUNCTION [--nth N] [--after]
        the Nth (1st) call of a function from now on kills its process, before it acts or
        after; once, counted over all processes (0: not any more)
  clear ROOT [GPU]
        takes back all of it; MIG mode and instances stay
  gpus ROOT
        the PCI addresses

GPU is an index, a UUID, a PCI address or a device's name such as gpu-0000-1b-00-0.
The state file is another than ROOT/state.json where FAKE_NVML_STATE says so.";

fn main() -> ExitCode {
    match run(std::env::args().skip(1).collect()) {
        Ok(()) => ExitCode::SUCCESS,
        Err(reason) => {
            eprintln!("fake-nvml: {reason}");
            ExitCode::FAILURE
        }
    }
}

/// Arguments: those in order, and options with and without a value.
struct Arguments {
    places: std::collections::VecDeque<String>,
    options: Vec<String>,
}

impl Arguments {
    fn place(&mut self, what: &str) -> Result<String, String> {
        self.places
            .pop_front()
            .ok_or_else(|| format!("{what} is missing; see fake-nvml --help"))
    }

    fn number<T: std::str::FromStr>(&mut self, what: &str) -> Result<T, String> {
        number(&self.place(what)?, what)
    }

    fn flag(&mut self, name: &str) -> bool {
        let at = self.options.iter().position(|option| option == name);
        at.map(|at| self.options.remove(at)).is_some()
    }

    fn option(&mut self, name: &str) -> Option<String> {
        let at = self.options.iter().position(|option| option == name)?;
        let value = (at + 1 < self.options.len()).then(|| self.options.remove(at + 1));
        // Without a value it stays, and is refused at the end.
        value.inspect(|_| {
            self.options.remove(at);
        })
    }

    fn count<T: std::str::FromStr>(&mut self, name: &str) -> Result<Option<T>, String> {
        self.option(name)
            .map(|value| number(&value, name))
            .transpose()
    }

    fn end(&self) -> Result<(), String> {
        match self.places.iter().chain(&self.options).next() {
            None => Ok(()),
            Some(rest) => Err(format!(
                "{rest} is not understood here; see fake-nvml --help"
            )),
        }
    }
}

fn number<T: std::str::FromStr>(text: &str, what: &str) -> Result<T, String> {
    text.parse()
        .map_err(|_| format!("{what} has to be a number, not {text:?}"))
}

/// `GI[:CI]`.
fn instance(text: &str) -> Result<Instance, String> {
    match text.split_once(':') {
        None => Ok((number(text, "GI")?, None)),
        Some((gi, ci)) => Ok((number(gi, "GI")?, Some(number(ci, "CI")?))),
    }
}

/// The number of an action in `nvml.h`.
fn action(name: &str) -> Result<u32, String> {
    let names = [
        "none",
        "gpu-reset",
        "node-reboot",
        "drain-p2p",
        "drain-and-reset",
    ];
    (0..)
        .zip(names)
        .find_map(|(number, known)| (known == name).then_some(number))
        .ok_or_else(|| format!("ACTION is one of {}, not {name:?}", names.join(", ")))
}

/// Options that take a value.
const VALUED: [&str; 8] = [
    "--instance",
    "--count",
    "--correctable",
    "--uncorrectable",
    "--celsius",
    "--memory",
    "--gpu",
    "--nth",
];

fn run(arguments: Vec<String>) -> Result<(), String> {
    if arguments.is_empty()
        || arguments
            .iter()
            .any(|word| word == "--help" || word == "-h")
    {
        println!("{HELP}");
        return Ok(());
    }
    let mut words = Arguments {
        places: Default::default(),
        options: Vec::new(),
    };
    let mut rest = arguments.into_iter();
    while let Some(word) = rest.next() {
        if VALUED.contains(&word.as_str()) {
            words.options.push(word);
            words.options.extend(rest.next());
        } else if word.starts_with('-') {
            words.options.push(word);
        } else {
            words.places.push_back(word);
        }
    }
    let command = words.place("COMMAND")?;
    let root = PathBuf::from(words.place("ROOT")?);
    let state =
        std::env::var_os("FAKE_NVML_STATE").map_or_else(|| root.join("state.json"), PathBuf::from);
    let hardware =
        Hardware::new(&root.join("topology.yaml"), state).map_err(|error| error.to_string())?;
    act(&command, &hardware, words)
}

fn act(command: &str, hardware: &Hardware, mut words: Arguments) -> Result<(), String> {
    let done = match command {
        "gpus" => {
            words.end()?;
            println!("{}", hardware.gpus().join("\n"));
            Ok(())
        }
        "clear" => {
            let gpu = words.places.pop_front();
            words.end()?;
            hardware.clear(gpu.as_deref())
        }
        "fail" => {
            let (function, code) = (words.place("FUNCTION")?, words.number("CODE")?);
            let gpu = words.option("--gpu");
            words.end()?;
            hardware.fail(gpu.as_deref(), &function, (code != 0).then_some(code))
        }
        "delay" => {
            let (function, seconds) = (words.place("FUNCTION")?, words.number("SECONDS")?);
            let gpu = words.option("--gpu");
            words.end()?;
            let delay = Duration::try_from_secs_f64(seconds)
                .map_err(|_| format!("SECONDS cannot be {seconds}"))?;
            hardware.delay(gpu.as_deref(), &function, delay)
        }
        "kill" => {
            let function = words.place("FUNCTION")?;
            let nth = words.count("--nth")?.unwrap_or(1);
            let at = if words.flag("--after") {
                KillAt::End
            } else {
                KillAt::Begin
            };
            words.end()?;
            hardware.kill(&function, nth, at)
        }
        _ => return act_on_gpu(command, hardware, words),
    };
    done.map_err(|error| error.to_string())
}

fn act_on_gpu(command: &str, hardware: &Hardware, mut words: Arguments) -> Result<(), String> {
    let gpu = words.place("GPU")?;
    let done = match command {
        "xid" => {
            let xid = words.number("XID")?;
            let instance = words
                .option("--instance")
                .map(|i| instance(&i))
                .transpose()?;
            words.end()?;
            hardware.xid(&gpu, xid, instance)
        }
        "ecc" => {
            let (count, corrected) = (words.count("--count")?, words.flag("--corrected"));
            words.end()?;
            hardware.ecc(&gpu, !corrected, count.unwrap_or(1))
        }
        "row-remap" => {
            let rows = RowRemap {
                correctable: words.count("--correctable")?.unwrap_or(0),
                uncorrectable: words.count("--uncorrectable")?.unwrap_or(0),
                pending: words.flag("--pending"),
                failed: words.flag("--failed"),
            };
            words.end()?;
            hardware.remap_rows(&gpu, rows)
        }
        "thermal" => {
            let celsius = words.count("--celsius")?;
            let slowdown = Slowdown {
                hw_thermal: words.flag("--hw"),
                sw_thermal: words.flag("--sw"),
                power_brake: words.flag("--power-brake"),
            };
            words.end()?;
            hardware.heat(&gpu, celsius, slowdown)
        }
        "action" => {
            let action = action(&words.place("ACTION")?)?;
            words.end()?;
            hardware.recovery_action(&gpu, action)
        }
        "lost" => {
            words.end()?;
            hardware.lose(&gpu)
        }
        "recover" => {
            words.end()?;
            hardware.reset(&gpu)
        }
        "process" => {
            let pid = words.number("PID")?;
            let memory = words.count("--memory")?.unwrap_or(256);
            let ends = words.flag("--end");
            let instance = words
                .option("--instance")
                .map(|text| instance(&text))
                .transpose()?
                .map(|(gi, ci)| (gi, ci.unwrap_or(0)));
            words.end()?;
            if ends {
                hardware.end_process(&gpu, pid)
            } else {
                hardware.start_process(&gpu, pid, memory, instance)
            }
        }
        _ => {
            return Err(format!(
                "there is no command {command}; see fake-nvml --help"
            ));
        }
    };
    done.map_err(|error| error.to_string())
}

//! Machines of a network: namespaces on two bridges, one for the clients and one for Redis.

use std::env;
use std::fs;
use std::net::Ipv4Addr;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::process::{Command, ExitCode};

/// Set in the process that runs in its own namespaces.
const ISOLATED_VARIABLE: &str = "TIDEGATE_FLEET_INSIDE";

/// Address of the test itself on both bridges.
const HOST_NUMBER: u8 = 254;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum BridgeNetwork {
    /// Between the clients and the nodes.
    Front,
    /// Between the nodes and the Redis masters.
    Back,
}

/// One network namespace; removed on drop.
#[derive(Debug)]
pub(crate) struct NetworkMachine {
    number: u8,
    nets: &'static [BridgeNetwork],
}

pub(crate) fn is_isolated() -> bool {
    env::var_os(ISOLATED_VARIABLE).is_some()
}

/// Restarts this program in new namespaces, which remove everything when it ends. Root is not
/// required if user namespaces are allowed.
pub(crate) fn restart_in_namespaces() -> ExitCode {
    let mut unshare = Command::new("unshare");
    unshare.args([
        "--net",
        "--mount",
        "--pid",
        "--fork",
        "--kill-child",
        "--mount-proc",
    ]);
    if fs::metadata("/proc/self").is_ok_and(|of_us| of_us.uid() != 0) {
        unshare.args(["--user", "--map-root-user"]);
    }
    let ran = unshare
        .arg(env::current_exe().unwrap())
        .env(ISOLATED_VARIABLE, "1")
        .status();
    match ran.map(|status| status.code()) {
        Ok(Some(0)) => ExitCode::SUCCESS,
        Ok(Some(1)) => {
            eprintln!(
                "if that was unshare: namespaces are needed, as root or where users may make their own"
            );
            ExitCode::FAILURE
        }
        _ => ExitCode::FAILURE,
    }
}

/// Creates both bridges, with an address of the test on each.
pub(crate) fn create_bridges() {
    // Directory of the names of `ip netns`; the system's own may not be writable.
    run_command("mount", "-t tmpfs tmpfs /run");
    run_ip("link set lo up");
    for net in [BridgeNetwork::Front, BridgeNetwork::Back] {
        let name = net.name();
        run_ip(&format!("link add {name} type bridge"));
        run_ip(&format!(
            "addr add {}/24 dev {name}",
            net.address(HOST_NUMBER)
        ));
        run_ip(&format!("link set {name} up"));
    }
}

impl BridgeNetwork {
    fn name(self) -> &'static str {
        match self {
            Self::Front => "front",
            Self::Back => "back",
        }
    }

    fn address(self, number: u8) -> Ipv4Addr {
        Ipv4Addr::new(10, 77, if self == Self::Front { 1 } else { 2 }, number)
    }
}

impl NetworkMachine {
    pub(crate) fn new(number: u8, nets: &'static [BridgeNetwork]) -> Self {
        run_ip(&format!("netns add m{number}"));
        run_ip(&format!("-n m{number} link set lo up"));
        for net in nets {
            let name = net.name();
            run_ip(&format!(
                "link add {name}{number} type veth peer name {name} netns m{number}"
            ));
            run_ip(&format!(
                "-n m{number} addr add {}/24 dev {name}",
                net.address(number)
            ));
            run_ip(&format!("-n m{number} link set {name} up"));
            run_ip(&format!("link set {name}{number} master {name} up"));
        }
        Self { number, nets }
    }

    pub(crate) fn address(&self, net: BridgeNetwork) -> Ipv4Addr {
        net.address(self.number)
    }

    /// Drops all packets without notifying either side, like a failed switch.
    pub(crate) fn disconnect(&self, net: BridgeNetwork) {
        run_ip(&format!("link set {}{} nomaster", net.name(), self.number));
    }

    pub(crate) fn reconnect(&self, net: BridgeNetwork) {
        run_ip(&format!(
            "link set {0}{1} master {0}",
            net.name(),
            self.number
        ));
    }

    pub(crate) fn disconnect_all(&self) {
        self.nets.iter().for_each(|net| self.disconnect(*net));
    }

    /// Returns a command that runs on this machine and ends with the test.
    pub(crate) fn command_in_namespace(
        &self,
        program: impl AsRef<Path>,
    ) -> tokio::process::Command {
        // nsenter replaces itself with the program, so the process id is that of the program.
        let mut command = tokio::process::Command::new("nsenter");
        command
            .arg(format!("--net=/run/netns/m{}", self.number))
            .arg(program.as_ref());
        command
            .env_clear()
            .env("PATH", env::var_os("PATH").unwrap_or_default())
            .kill_on_drop(true);
        command
    }
}

impl Drop for NetworkMachine {
    fn drop(&mut self) {
        run_ip(&format!("netns del m{}", self.number));
    }
}

fn run_ip(words: &str) {
    run_command("ip", words);
}

fn run_command(program: &str, words: &str) {
    let status = Command::new(program).args(words.split(' ')).status();
    assert!(
        status.is_ok_and(|status| status.success()),
        "{program} {words}"
    );
}

//! What a connector tells the two engines of a pair, and when the second may be told.

use std::fmt::Debug;

use crate::state::Endpoint;

/// How the two legs follow each other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Order {
    /// The decode leg goes out once the prefill leg is answered.
    PrefillFirst,
    /// It goes out once the prefill leg has a connection: the engines wait for each other.
    Together,
    /// The decode engine's sidecar runs the prefill leg.
    BySidecar,
}

/// What both legs agree on before either is sent.
#[derive(Debug)]
pub struct Meeting<'a> {
    /// The engine that prefills.
    pub prefill: &'a Endpoint,
    /// Names the transfer: unique in the world, of letters, digits and dashes.
    pub transfer_id: &'a str,
    /// Random bits, of which rooms are made.
    pub room_seed: u64,
    /// Prompts, if they come as a list.
    pub batch: Option<usize>,
}

/// What the prefill leg came back with.
#[derive(Clone, Copy, Debug, Default)]
pub struct Prefilled<'a> {
    /// Its answer, JSON.
    pub answer: &'a [u8],
    /// What the prefill engine's bootstrap server answered, where the connector asks it.
    pub bootstrap: Option<&'a [u8]>,
}

/// Members of a body, each followed by a comma: `"name":json,`.
pub type Fields = String;

/// Why a prefill that was answered is of no use to the decode leg.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Useless {
    /// It says nothing of where the blocks are: it ended by itself, or its engine has no such connector.
    NoFields,
    /// The bootstrap server's answer makes no sense.
    Bootstrap,
}

/// A connector. What is not said otherwise is that of engines that find their blocks by themselves.
pub trait Connector: Debug + Sync {
    /// How the legs follow each other.
    fn order(&self) -> Order {
        Order::PrefillFirst
    }

    /// Whether several prompts in one body can be handed over.
    fn takes_batches(&self) -> bool {
        true
    }

    /// Whether several answers to one prompt can be generated of what was handed over. To engines each of them is a request
    /// that fetches blocks for itself.
    fn takes_several_answers(&self) -> bool {
        true
    }

    /// Members that the prefill body gets.
    fn prefill(&self, _: &Meeting<'_>) -> Fields {
        Fields::new()
    }

    /// Path that the prefill engine's bootstrap server is asked for beside the prefill leg.
    fn bootstrap_path(&self) -> Option<&'static str> {
        None
    }

    /// Members that the decode body gets.
    fn decode(&self, _: &Meeting<'_>, _: Prefilled<'_>) -> Result<Fields, Useless> {
        Ok(Fields::new())
    }
}

/// Port of bootstrap servers where nothing says otherwise: the default of vLLM's `VLLM_MOONCAKE_BOOTSTRAP_PORT` and of
/// `SGLang`'s `--disaggregation-bootstrap-port`.
pub const BOOTSTRAP_PORT: u16 = 8998;

/// The port of an engine's bootstrap server.
pub fn bootstrap_port(endpoint: &Endpoint) -> u16 {
    endpoint.transfer.bootstrap_port.unwrap_or(BOOTSTRAP_PORT)
}

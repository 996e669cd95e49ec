//! Engines that find each other's blocks by themselves: one prefills, then the other gets the client's body as it is.

use super::connector::Connector;

/// Kthena's default connector.
#[derive(Debug)]
pub struct Http;

impl Connector for Http {}

"""Why a plan is as it is, what alternatives would take, what more of a resource is worth."""

/** Whether the server answers. */

class Connection {
  isLost = $state(false);

  lose(): void {
    this.isLost = true;
  }

  restore(): void {
    this.isLost = false;
  }
}

export const connection = new Connection();

/** Whether the server answers, and how many calls wait for their answers. */

class Connection {
  isLost = $state(false);
  calls = $state(0);

  lose(): void {
    this.isLost = true;
  }

  restore(): void {
    this.isLost = false;
  }
}

export const connection = new Connection();
